"""What a run should cost, by formula. Nothing here imports torch."""
