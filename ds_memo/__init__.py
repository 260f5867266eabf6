"""ds_memo: long-context training for DeepSpeed without the recompute tax."""

__version__ = "0.1.0"
