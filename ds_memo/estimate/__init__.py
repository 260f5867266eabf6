"""Estimates of a run by formula. Nothing here imports torch."""
