"""Imported last by a process that others are forked from: their collections of garbage leave alone what it has imported."""

import gc

gc.collect()
gc.freeze()
