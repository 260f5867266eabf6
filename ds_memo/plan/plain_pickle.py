"""A reader of pickles that builds dicts, lists, tuples, strings, numbers and nothing else.

The standard library's unpickler can be kept from importing, but not from taking all memory and time. The index of one
LONG_BINPUT, 4 bytes, makes it reserve gigabytes. A dict key of nested tuples takes 2^60 steps to hash, or overflows the C
stack. This reader knows the opcodes that Python's pickler writes for plain data (protocol 2 and later), and counts its
steps. Keys are strings only, whose hashes a file cannot predict.
"""

from __future__ import annotations

import gc
import struct
from pickle import (
    APPEND,
    APPENDS,
    BINFLOAT,
    BINGET,
    BININT,
    BININT1,
    BININT2,
    BINPUT,
    BINUNICODE,
    BINUNICODE8,
    EMPTY_DICT,
    EMPTY_LIST,
    EMPTY_TUPLE,
    FRAME,
    GLOBAL,
    LONG1,
    LONG_BINGET,
    LONG_BINPUT,
    MARK,
    MEMOIZE,
    NEWFALSE,
    NEWTRUE,
    NONE,
    PROTO,
    SETITEM,
    SETITEMS,
    SHORT_BINUNICODE,
    STACK_GLOBAL,
    STOP,
    TUPLE,
    TUPLE1,
    TUPLE2,
    TUPLE3,
)
from typing import Any

from ds_memo.errors import brief, quoted
from ds_memo.plan.errors import MalformedInput, UnsafePickle

MOST_STEPS = 1 << 24
"""Opcodes of a pickle: some 200,000 events with 60 stack frames each. An opcode adds at most 80 bytes, all add 1.3 GiB."""

_U1, _U2, _U4, _U8, _I4, _F8 = (struct.Struct(form) for form in ("<B", "<H", "<I", "<Q", "<i", ">d"))
_GET, _PUT = {BINGET[0]: _U1, LONG_BINGET[0]: _U4}, {BINPUT[0]: _U1, LONG_BINPUT[0]: _U4}  # opcode: its index
_NUMBER = {BININT1[0]: _U1, BININT2[0]: _U2, BININT[0]: _I4, BINFLOAT[0]: _F8}
_TEXT = {SHORT_BINUNICODE[0]: _U1, BINUNICODE[0]: _U4, BINUNICODE8[0]: _U8}  # opcode: its length
_CONSTANT: dict[int, Any] = {NONE[0]: None, NEWTRUE[0]: True, NEWFALSE[0]: False, EMPTY_TUPLE[0]: ()}
_TUPLE = {TUPLE1[0]: 1, TUPLE2[0]: 2, TUPLE3[0]: 3}
_SKIPPED = {PROTO[0]: 1, FRAME[0]: 8}  # opcode: bytes of its argument, which only streams need
_APPEND, _APPENDS, _SETITEM, _SETITEMS = APPEND[0], APPENDS[0], SETITEM[0], SETITEMS[0]
_EMPTY_LIST, _EMPTY_DICT, _MARK, _MEMOIZE, _STOP = EMPTY_LIST[0], EMPTY_DICT[0], MARK[0], MEMOIZE[0], STOP[0]
_MARKED_TUPLE, _LONG1 = TUPLE[0], LONG1[0]
_WRITTEN_BY = "a pickle of plain containers, as torch.cuda.memory._dump_snapshot writes it"


def load(data: bytes, source: str) -> Any:
    """Return the object that a pickle holds.

    Args:
        data: the whole pickle; bytes after its end are ignored.
        source: file name for messages.

    Raises:
        UnsafePickle: it imports something.
        MalformedInput: it ends too early, is damaged, holds something other than plain containers, or takes more than MOST_STEPS.
    """
    collects = gc.isenabled()
    gc.disable()  # it would scan millions of live containers again and again
    try:
        return _run(data, source)
    except struct.error:
        raise MalformedInput(source, 0, "the end of the file", "a whole pickle") from None
    except UnicodeDecodeError:
        raise MalformedInput(source, 0, "a string that is not UTF-8", _WRITTEN_BY) from None
    except (IndexError, KeyError, TypeError, AttributeError, ValueError) as error:  # the stack of a damaged pickle
        seen = f"damage ({type(error).__name__}: {error})"
        raise MalformedInput(source, 0, seen, _WRITTEN_BY) from None
    finally:
        if collects:
            gc.enable()


def _run(data: bytes, source: str) -> Any:
    end, at, steps = len(data), 0, 0
    stack: list[Any] = []
    marks: list[int] = []  # lengths of the stack
    memo: list[Any] = []  # picklers number what they store from 0 on
    while True:
        if at >= end:
            raise MalformedInput(source, 0, "the end of the file", "a whole pickle")
        steps += 1
        if steps > MOST_STEPS:
            raise MalformedInput(source, 0, f"more than {MOST_STEPS:,} opcodes", "a shorter recording, of one training step")
        code = data[at]
        at += 1
        if form := _GET.get(code):
            stack.append(memo[form.unpack_from(data, at)[0]])
            at += form.size
        elif code == _MEMOIZE:
            memo.append(stack[-1])
        elif form := _NUMBER.get(code):
            stack += form.unpack_from(data, at)
            at += form.size
        elif code == _MARK:
            marks.append(len(stack))
        elif code in (_SETITEMS, _SETITEM):
            items = _taken(stack, marks.pop() if code == _SETITEMS else len(stack) - 2)
            _set(stack[-1], items, source)
        elif code in (_APPENDS, _APPEND):
            items = _taken(stack, marks.pop() if code == _APPENDS else len(stack) - 1)
            stack[-1].extend(items)
        elif code == _EMPTY_LIST:
            stack.append([])
        elif code == _EMPTY_DICT:
            stack.append({})
        elif form := _TEXT.get(code):
            at += form.size
            size = form.unpack_from(data, at - form.size)[0]
            stack.append(_bytes(data, at, size).decode("utf-8", "surrogatepass"))
            at += size
        elif code == _LONG1:
            size = _bytes(data, at, 1)[0]
            stack.append(int.from_bytes(_bytes(data, at + 1, size), "little", signed=True))
            at += 1 + size
        elif code in _CONSTANT:
            stack.append(_CONSTANT[code])
        elif form := _PUT.get(code):
            index = form.unpack_from(data, at)[0]
            if index > len(memo):
                raise IndexError(f"{index:,} stored after {len(memo):,}")
            memo[index : index + 1] = [stack[-1]]
            at += form.size
        elif code in _TUPLE or code == _MARKED_TUPLE:
            stack.append(tuple(_taken(stack, len(stack) - _TUPLE[code] if code in _TUPLE else marks.pop())))
        elif code in _SKIPPED:
            at += _SKIPPED[code]
        elif code == _STOP:
            return stack.pop()
        else:
            raise _refusal(data, at, stack, source)


def _bytes(data: bytes, at: int, size: int) -> bytes:
    found = data[at : at + size]
    if len(found) < size:
        raise struct.error
    return found


def _taken(stack: list[Any], first: int) -> list[Any]:
    if not 0 <= first <= len(stack):
        raise IndexError("fewer values than wanted")
    items = stack[first:]
    del stack[first:]
    return items


def _set(target: dict[str, Any], items: list[Any], source: str) -> None:
    if type(target) is not dict or len(items) % 2:
        raise TypeError("items without a dict")
    keys = items[::2]
    for key in keys:
        if type(key) is not str:
            raise MalformedInput(source, 0, f"the dict key {brief(key)}", "strings as keys")
    target.update(zip(keys, items[1::2], strict=True))


def _refusal(data: bytes, at: int, stack: list[Any], source: str) -> Exception:
    code = data[at - 1]
    if code == STACK_GLOBAL[0]:
        wanted = ".".join(str(name) if isinstance(name, str) else brief(name) for name in stack[-2:])
    elif code == GLOBAL[0]:
        wanted = ".".join(data[at : at + 400].decode("utf-8", "replace").split("\n")[:2])
    else:
        return MalformedInput(source, 0, f"the opcode {bytes([code])!r} at byte {at - 1:,}", _WRITTEN_BY)
    return UnsafePickle(f"{quoted(source, 400)}: the pickle asks for {quoted(wanted)}; a snapshot has plain containers only")
