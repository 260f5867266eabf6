"""Hypothesis strategies for damaged files: the corpus of tests/data/fuzz, cut, doubled and filled with junk."""

from __future__ import annotations

import copy
import json
import math
import pickle
import re
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

CORPUS = Path(__file__).resolve().parents[1] / "data" / "fuzz"


def _nested(depth: int) -> list:
    found: list = []
    for _ in range(depth):
        found = [found]
    return found


JUNK: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 512, 2**31, 2**53, 2**62, 2**63 - 1, 2**63, -(2**63), 10**18, 10**30, 10**400),
    *(0.5, -0.5, 1e-300, 5e-324, 1e18, 1e308, -1e308, math.nan, math.inf, -math.inf),
    *("", "x", "x" * 199, "x" * 5000, "\x1b[31m", "\n", "\0", "\ud800", "$x^{y$", "</script>", "é", "auto"),
    *("~nosuchuser/x", "L0.f", "gemm", "bfloat16"),
    *([], {}, [[]], [None], [1, 2, 3], {"a": 1}, {"": {}}, {"\ud800": 1}, ["x" * 5000] * 3, _nested(300)),
]  # fmt: skip
TOKENS = [
    *(b"", b" ", b"\n", b"\r\n", b"\r", b"\t", b",", b'"', b"#", b"\0", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf"),
    *(b"\x1b[31m", "é".encode()),
    *(b"-1", b"0", b"1", b"9" * 18, b"9" * 30, b"9" * 5000, b"1e308", b"NaN", b"Infinity", b"x" * 300, b"null", b"true"),
    *(b"phase ", b"malloc ", b"free ", b"L0.f", b"L1.b", b"L99999999999.f", b"step", b"embed", b"head", b"0", b"5"),
    *(b"{", b"}", b"[", b"]" * 3, b"[" * 2000, b":", b'"name": ', b"\\ud800", b"$x^{y$"),
]  # fmt: skip
_CODES = b"().0123}]N\x88\x89KMJ\x8a\x8b\x8c\x8d\x8eX\x93\x94\x85\x86\x87tuseahjqrRcio\x81\x8f\x90\x95\x96\x97\x98"
OPCODES = [bytes([code]) for code in _CODES]
OPCODES += [b"\xff\xff\xff\xff", b"\x00\x00\x00\x7f", b"\x94h\x00", b"h\x00h\x00\x86"]


def edits(original: bytes, tokens: list[bytes]) -> st.SearchStrategy[bytes]:
    """Return files with up to five paths cut, doubled or filled."""
    place = st.integers(0, len(original))
    edit = st.tuples(place, st.integers(0, 40), st.sampled_from(tokens), st.integers(0, 3))

    def apply(drawn: list[tuple[int, int, bytes, int]]) -> bytes:
        data = original
        for at, length, token, times in drawn:
            data = data[:at] + token + data[at : at + length] * (times == 2) + data[at + length * (times != 3) :]
        return data

    return st.lists(edit, max_size=5).map(apply)


def swapped(original: bytes, tokens: list[bytes]) -> st.SearchStrategy[bytes]:
    """Return files with up to three words replaced by words of their own or by junk, and up to two lines gone or doubled."""
    lines = [re.split(rb"([ ,])", line) for line in original.splitlines()]
    words = sorted({word for line in lines for word in line})
    swap = st.tuples(st.integers(0, len(lines) - 1), st.integers(0, 8), st.sampled_from(words * 2 + tokens))
    move = st.tuples(st.integers(0, len(lines) - 1), st.sampled_from([0, 2]))

    def apply(drawn: tuple[list[tuple[int, int, bytes]], list[tuple[int, int]]]) -> bytes:
        found = [list(line) for line in lines]
        for at, word, token in drawn[0]:
            found[at][word % len(found[at])] = token
        for at, times in drawn[1]:
            found[at : at + 1] = found[at : at + 1] * times
        return b"".join(b"".join(line) + b"\n" for line in found)

    return st.tuples(st.lists(swap, max_size=3), st.lists(move, max_size=2)).map(apply)


def paths(value: Any, path: tuple = ()) -> list[tuple]:
    """Return the path of every entry in a JSON value."""
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in items:
        found += paths(part, (*path, name))
    return found


def replaced(original: Any) -> st.SearchStrategy[Any]:
    """Return values with up to three of their parts gone, doubled or replaced by junk."""
    edit = st.tuples(st.sampled_from(paths(original)), st.sampled_from(JUNK), st.sampled_from(["put"] * 4 + ["drop", "add"]))

    def apply(drawn: list[tuple[tuple, Any, str]]) -> Any:
        root = {"": copy.deepcopy(original)}
        for path, junk, how in copy.deepcopy(drawn):  # a later edit may go into junk, which all examples share
            owner, name = root, ""
            try:
                for step in path:
                    owner, name = owner[name], step
                if how == "drop" and owner is not root:
                    del owner[name]
                elif how == "add" and isinstance(owner, list):
                    owner.insert(name, copy.deepcopy(owner[name]))
                elif how == "add" and isinstance(junk, str):
                    owner[junk] = owner[name]
                else:
                    owner[name] = junk
            except (KeyError, IndexError, TypeError):  # an earlier edit took it away
                continue
        return root[""]

    return st.lists(edit, min_size=1, max_size=3).map(apply)


def texts(name: str) -> st.SearchStrategy[bytes]:
    original = (CORPUS / name).read_bytes()
    return st.one_of(swapped(original, TOKENS), edits(original, TOKENS))


def jsons(name: str) -> st.SearchStrategy[bytes]:
    """Return files with wrong values, or whose text is no JSON."""
    root = json.loads((CORPUS / name).read_text())
    dumped = replaced(root).map(lambda value: json.dumps(value).encode())
    return st.one_of(dumped, dumped, dumped, edits((CORPUS / name).read_bytes(), TOKENS))


def pickles(name: str) -> st.SearchStrategy[bytes]:
    original = (CORPUS / name).read_bytes()
    values = replaced(pickle.loads(original))
    dumped = st.tuples(values, st.integers(0, 5)).map(lambda both: pickle.dumps(*both))
    return st.one_of(dumped, edits(original, OPCODES + TOKENS))


def sections(name: str) -> st.SearchStrategy[Any]:
    return replaced(json.loads((CORPUS / name).read_text()))
