"""What a run needs, measured: layers, copies, live bytes, memory requests. Imports nothing: a profile is read without torch."""
