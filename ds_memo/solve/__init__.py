"""Alpha and the homes, by linear programming over what is known of a run. Nothing here imports torch."""
