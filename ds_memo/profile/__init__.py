"""Measurements of a run: layers, copies, live bytes, memory requests. Imports nothing: a profile is read without torch."""
