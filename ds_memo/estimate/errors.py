"""What `ds-memo estimate` refuses."""

from ds_memo.errors import MemoError


class EstimateError(MemoError, ValueError):
    """A hardware file, model file, layout or value that cannot be used: says what was seen and what was expected."""
