"""What a run needs, measured: live bytes, and later sizes, times and bandwidths."""

from ds_memo.profile.live import LiveBytes

__all__ = ["LiveBytes"]
