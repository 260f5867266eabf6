"""What ds_memo raises and warns with. Imports nothing, so every part can use it."""


class MemoError(RuntimeError):
    """Something ds_memo cannot go on with: what was seen, what was expected, what to do."""


class MemoConfigError(MemoError, ValueError):
    """A value in the "memo" section that is refused: the field, the value, what is allowed."""


class MemoWarning(UserWarning):
    """Training goes on, but not as asked; the same fact shows in ``ds_memo.report()``."""
