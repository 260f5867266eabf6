"""What ds_memo raises and warns with. Imports nothing, so every part can use it."""


class MemoError(RuntimeError):
    """Something ds_memo cannot go on with: what was seen, what was expected, what to do."""


class MemoConfigError(MemoError, ValueError):
    """A value in the "memo" section that is refused: the field, the value, what is allowed."""


class MemoWarning(UserWarning):
    """Training goes on, but not as asked; the same fact shows in ``ds_memo.report()``."""


def quoted(text: object, most: int = 120) -> str:
    """Return a name or value as a message may show it: on one line, without terminal escapes, cut in its middle.

    Args:
        text: anything; a string that is plain and short is returned as it is.
        most: characters to keep.
    """
    shown = text if isinstance(text, str) else repr(text)
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in shown)
    if len(shown) > most:
        cut = len(shown) - most
        shown = f"{shown[: most * 2 // 3]}…[{cut:,} characters]…{shown[-(most - most * 2 // 3) :]}"
    return shown
