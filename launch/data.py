"""Long documents from files, as packed token windows.

Documents are tokenised, each ended by the end-of-sequence token, joined and cut into windows of `seq_length`. A window
may hold several documents, or a part of one. Attention and loss cross their borders, unless the windows keep them apart.
Everything that is random follows from the seed alone, so a run that resumes reads on exactly where it stopped.
Every rank tokenises everything and holds it in memory, 4 bytes a token.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

VALIDATION_SHARE = 0.05  # of the documents; at least one


class DataError(ValueError):
    """Data that cannot be used; says in one line what to change."""


class Tokenizer(Protocol):
    """A tokenizer for `load_windows`."""

    vocab_size: int
    eos: int

    def encode(self, text: str) -> np.ndarray: ...


class ByteTokenizer:
    """UTF-8 bytes as tokens 0 to 255, then end of sequence (256) and begin of sequence (257, unused here)."""

    vocab_size, eos = 258, 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8).astype(np.int32)


class HFTokenizer:
    """A Hugging Face tokenizer directory; no file is fetched.

    Raises:
        DataError: Where the directory holds no tokenizer, or one without an end-of-sequence token.
    """

    def __init__(self, directory: Path) -> None:
        from transformers import AutoTokenizer

        if not directory.is_dir():
            raise DataError(f"no tokenizer directory at {directory}; check --tokenizer")
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError) as error:
            raise DataError(f"no tokenizer in {directory} ({str(error).splitlines()[0]}); check --tokenizer") from error
        if self._tokenizer.eos_token_id is None:
            raise DataError(f"the tokenizer in {directory} has no end-of-sequence token; choose one that has")
        self.vocab_size, self.eos = len(self._tokenizer), self._tokenizer.eos_token_id

    def encode(self, text: str) -> np.ndarray:
        # verbose=False: "longer than the model's maximum" is what long-context training is for
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False, verbose=False), np.int32)


def standard_library() -> Path:
    """Return the folder of this Python's own sources: real long documents on every machine."""
    return Path(sysconfig.get_path("stdlib"))


def read_documents(sources: list[Path]) -> Iterator[str]:
    """The documents of text files and JSONL files ("text" of each line), and of all such files in folders, by name.

    In a folder, files that are not UTF-8 text are passed over, and so are installed packages (site-packages).

    Raises:
        DataError: Where a source does not exist, or a JSONL line has no "text".
    """
    for source in sources:
        if not source.exists():
            raise DataError(f"no data found at {source}; check --data")
        files = [source] if source.is_file() else sorted(p for p in source.rglob("*") if _wanted(p, source))
        for file in files:
            try:
                text = file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                if file is source:
                    raise DataError(f"{file} is not UTF-8 text; convert or remove it") from None
                continue
            if file.suffix == ".jsonl":
                yield from _jsonl_documents(file, text)
            elif text.strip():
                yield text


TEXT_SUFFIXES = {
    ".txt", ".md", ".rst", ".tex", ".html", ".jsonl",
    ".py", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".js", ".ts", ".sh",
}  # fmt: skip


def _wanted(path: Path, folder: Path) -> bool:
    inside = path.relative_to(folder).parts
    return path.suffix in TEXT_SUFFIXES and path.is_file() and "site-packages" not in inside


def _jsonl_documents(file: Path, text: str) -> Iterator[str]:
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: JSON strings may hold U+2028
        if not line.strip():
            continue
        try:
            document = json.loads(line)["text"]
        except (json.JSONDecodeError, KeyError, TypeError):
            raise DataError(f'{file}:{number}: expected a JSON object with a "text" field') from None
        if document.strip():
            yield document


@dataclass
class Windows:
    """Packed tokens, read as windows of `seq_length` inputs with the next token of each as its label."""

    tokens: np.ndarray
    seq_length: int
    seed: int
    starts: np.ndarray | None = None
    """The first token of each document, where documents are kept apart."""
    _order: tuple[int, np.ndarray] = (-1, np.empty(0))  # the last epoch asked for and its order of windows

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_length

    def batch(self, first: int, rows: int, shuffle: bool = True) -> dict[str, torch.Tensor]:
        """Samples `first` to `first + rows` of an endless sequence of epochs, each in its own order.

        Returns:
            `input_ids` and `labels`, int64 (rows, seq_length); labels[i] is the token after input_ids[i]. Where documents are
            kept apart, also `position_ids`, which start again with each, and the label across a border is -100.
        """
        windows = [self._window(sample, shuffle) for sample in range(first, first + rows)]
        return {name: torch.cat([window[name] for window in windows]) for name in windows[0]}

    def _window(self, sample: int, shuffle: bool) -> dict[str, torch.Tensor]:
        epoch, index = divmod(sample, len(self))
        if shuffle:
            if self._order[0] != epoch:
                self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(len(self))
            index = self._order[1][index]
        start = int(index) * self.seq_length
        window = self.tokens[start : start + self.seq_length + 1]
        if self.starts is None:
            both = torch.from_numpy(window).long()[None]
            return {"input_ids": both[:, :-1], "labels": both[:, 1:]}
        from transformers import DataCollatorWithFlattening

        first, last = np.searchsorted(self.starts, [start + 1, start + len(window)])
        documents = np.split(window, self.starts[first:last] - start)
        packed = DataCollatorWithFlattening()([{"input_ids": document} for document in documents])
        labels = packed.pop("labels")[:, 1:]  # -100 at each document's first token
        return {"labels": labels} | {name: value[:, :-1] for name, value in packed.items()}


def load_windows(
    documents: Iterator[str] | list[str], tokenizer: Tokenizer, seq_length: int, seed: int, apart: bool = False
) -> tuple[Windows, Windows]:
    """Tokenise, split by document into training and validation, and pack.

    Args:
        apart: Keep the documents of a window apart.

    Raises:
        DataError: Where there are fewer than two documents, or either part does not fill one window.
    """
    encoded = [np.append(tokenizer.encode(text), np.int32(tokenizer.eos)) for text in documents]
    if len(encoded) < 2:
        raise DataError(f"no data found: {len(encoded)} documents, expected at least 2 (one to validate on)")
    order = np.random.default_rng(seed).permutation(len(encoded))
    held_out = max(1, round(VALIDATION_SHARE * len(encoded)))
    parts = {"validation": order[:held_out], "training": order[held_out:]}
    windows = {}
    for name, indices in parts.items():
        part = [encoded[i] for i in indices]
        starts = np.cumsum([0, *map(len, part)])[:-1] if apart else None
        windows[name] = Windows(np.concatenate(part), seq_length, seed, starts)
        if not len(windows[name]):
            raise DataError(
                f"data too small: the {name} part has {len(windows[name].tokens)} tokens, "
                f"--seq-length {seq_length} needs {seq_length + 1}: add data, or shorten it"
            )
    return windows["training"], windows["validation"]
