"""Plots and printed reports. Each drawing function imports matplotlib or plotly (the `plot` extra) itself."""
