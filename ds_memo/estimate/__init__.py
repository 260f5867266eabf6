"""Estimates of a run before it is rented."""
