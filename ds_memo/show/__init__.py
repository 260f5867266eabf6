"""Pictures. Matplotlib and plotly (the `plot` extra) are imported by the function that draws."""
