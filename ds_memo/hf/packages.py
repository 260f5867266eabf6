"""A kernel's package. It counts as installed if it has the symbols that ds_memo uses."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from ds_memo.errors import MemoError

INSTALL_APEX = (
    'git clone https://github.com/NVIDIA/apex && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install -v --no-build-isolation ./apex '
    '(the package "apex" on the index is something else)'
)  # fmt: skip


@dataclass(frozen=True)
class Package:
    """A kernel's module, and the command that installs it."""

    module: str
    symbols: tuple[str, ...]
    install: str
    compiled: str | None = None
    """The extension that it imports at first use: a build without it has the same symbols."""

    def load(self, setting: str) -> Any:
        """Import the module.

        Raises:
            MemoError: it cannot be imported, or is another package of the same name.
        """
        try:
            module = importlib.import_module(self.module)
            if self.compiled:
                importlib.import_module(self.compiled)
        except Exception as error:  # a build for another torch fails in many ways
            raise MemoError(f"{setting}: {self.module} cannot be used ({error}). Install it: {self.install}") from error
        lacking = [symbol for symbol in self.symbols if not hasattr(module, symbol)]
        if lacking:
            raise MemoError(
                f"{setting}: the {self.module} that is installed has no {', '.join(lacking)}: it is another package of that "
                f"name, or too old. Install the right one: {self.install}"
            )
        return module
