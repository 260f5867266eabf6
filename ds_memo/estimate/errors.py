"""The error of `ds-memo estimate`."""

from ds_memo.errors import MemoError


class EstimateError(MemoError, ValueError):
    """A hardware file, model file, layout or value that cannot be used."""
