"""AllocatorBuilder: compiles and loads the allocator op, the way DeepSpeed builds its own ops.

    python -m ds_memo.ops.builder                    # DeepSpeed's op report with this op in it; what is missing, if anything
    DS_BUILD_MEMO_ALLOCATOR=1 pip install .          # ahead of time; else it is compiled at first use (some 10 s, once)

There are two backends, cpu and cuda, from one core; both need a C++20 compiler and nothing of nvcc but its runtime headers.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import importlib.util
import os
import re
import shlex
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.builder import OpBuilder
from torch.utils import cpp_extension

SOURCES = Path(__file__).resolve().parent / "csrc"
BACKENDS = ("cpu", "cuda")
TOOLKITS = ("/usr/local/cuda",)
"""Where torch does not look if an nvcc stands elsewhere on the PATH."""


class AllocatorBuilder(OpBuilder):
    """Builds the op for one kind of device.

    Args:
        backend: "cpu" or "cuda"; absent: that of DeepSpeed's accelerator.
    """

    BUILD_VAR = "DS_BUILD_MEMO_ALLOCATOR"

    def __init__(self, backend: str | None = None) -> None:
        self.backend = backend or get_accelerator().device_name()
        super().__init__(name=f"memo_allocator_{self.backend}")

    def absolute_name(self) -> str:
        return f"ds_memo.ops.{self.name}_op"

    def sources(self) -> list[str]:
        return [str(SOURCES / f"allocator_{self.backend}.cpp")]

    def include_paths(self) -> list[str]:
        headers = cuda_headers() if self.backend == "cuda" else None
        return [str(SOURCES), *([str(headers)] if headers else [])]

    def cxx_args(self) -> list[str]:
        return ["-O3", "-std=c++20", "-fvisibility=hidden"]

    def extra_ldflags(self) -> list[str]:
        # The CUDA runtime comes with libc10_cuda; linking it once more could bring in a second one.
        return ["-lc10_cuda"] if self.backend == "cuda" else []

    def builder(self) -> cpp_extension.CppExtension:
        return cpp_extension.CppExtension(
            name=self.absolute_name(),
            sources=self.sources(),
            include_dirs=self.include_paths(),
            extra_compile_args={"cxx": self.cxx_args()},
            extra_link_args=self.extra_ldflags(),
        )

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether it can be compiled here. What is missing is in `error_log`, and printed if `verbose`."""
        missing = self.missing()
        self.error_log = "; ".join(missing) or None
        if missing and verbose:
            self.warning(f"{self.name}: {self.error_log}")
        return not missing

    def missing(self) -> list[str]:
        """What a build lacks, in words; empty if nothing."""
        if self.backend not in BACKENDS:
            return [f"there is no allocator for {self.backend!r} devices, only for {' and '.join(BACKENDS)}"]
        lacks = []
        compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]
        if shutil.which(compiler[0]) is None:
            lacks.append(f"no C++ compiler ({compiler[0]} is not on the PATH; install g++ or set CXX)")
        if not shutil.which("ninja") and importlib.util.find_spec("ninja") is None:
            lacks.append("no ninja (pip install ninja)")
        if not Path(sysconfig.get_path("include"), "Python.h").is_file():
            lacks.append("no Python.h (install the python3-dev package)")
        if self.backend == "cuda":
            if torch.version.cuda is None:
                lacks.append(f"torch {torch.__version__} is built without CUDA")
            if cuda_headers() is None:
                lacks.append(
                    "no cuda_runtime_api.h with crt/host_defines.h (looked in $CUDA_HOME/include, /usr/local/cuda/include "
                    "and the nvidia and triton packages; install the CUDA toolkit, or pip install triton)"
                )
        return lacks

    def load(self, verbose: bool = False) -> ModuleType:
        """The op, as installed ahead of time or compiled now.

        Raises:
            RuntimeError: it cannot be compiled here; says what is missing, or what the compiler said.
        """
        if self.name not in OpBuilder._loaded_ops:
            OpBuilder._loaded_ops[self.name] = self._installed() or self._compiled(verbose)
        return OpBuilder._loaded_ops[self.name]

    def _installed(self) -> ModuleType | None:
        """DeepSpeed's own table of installed ops cannot know this one, so it is looked for by name."""
        if importlib.util.find_spec(self.absolute_name()) is None:
            return None
        try:
            op = importlib.import_module(self.absolute_name())
        except ImportError:  # of another torch: its symbols are not there
            return None
        return op if torch.__version__.startswith(op.TORCH_VERSION) else None

    def _compiled(self, verbose: bool) -> ModuleType:
        if missing := self.missing():
            raise RuntimeError(f"{self.name} cannot be compiled: {'; '.join(missing)}")
        folder = self.build_folder()
        with _ninja_on_path(), _alone_in(folder), _compiler_of_one_word(folder):
            # Not through jit_load(): its folder has the op's name alone, so two checkouts or torches would take turns in it.
            return cpp_extension.load(
                name=self.name,
                sources=self.sources(),
                extra_include_paths=self.include_paths(),
                extra_cflags=self.cxx_args(),
                extra_ldflags=self.extra_ldflags(),
                build_directory=str(folder),
                verbose=verbose,
            )

    def build_folder(self) -> Path:
        """Where it is compiled to, in torch's cache of extensions; another torch, source or flag has another one."""
        key = hashlib.sha256("\0".join([torch.__version__, *self.cxx_args(), *self.include_paths()]).encode())
        for file in sorted(SOURCES.glob("allocator_*")):
            key.update(file.read_bytes())
        return Path(cpp_extension._get_build_directory(f"{self.name}_{key.hexdigest()[:12]}", verbose=False))


def cuda_headers() -> Path | None:
    """The folder of the CUDA runtime's headers: the toolkit's, or that of the packages which a CUDA build of torch depends on;
    the first that is of torch's CUDA, else the first. nvidia's own may lack crt/; triton has all of them, of an older CUDA."""
    places = [Path(home) / "include" for home in (cpp_extension.CUDA_HOME, *TOOLKITS) if home]
    for package, pattern in (("nvidia", "*/include"), ("triton", "backends/nvidia/include")):
        if spec := importlib.util.find_spec(package):
            for folder in spec.submodule_search_locations or ():
                places += sorted(Path(folder).glob(pattern))
    needed = ("cuda_runtime_api.h", "crt/host_defines.h")
    complete = [place for place in places if all((place / name).is_file() for name in needed)]
    major = (torch.version.cuda or "").partition(".")[0]
    return next((place for place in complete if _cuda_major(place) == major), complete[0] if complete else None)


def _cuda_major(headers: Path) -> str:
    found = re.search(r"define CUDART_VERSION\s+(\d+)", (headers / "cuda_runtime_api.h").read_text(errors="replace"))
    return str(int(found[1]) // 1000) if found else ""


@contextmanager
def _ninja_on_path() -> Iterator[None]:
    """An environment that is used without being activated has ninja, but not on the PATH."""
    before = os.environ.get("PATH", "")
    if shutil.which("ninja") is None:
        os.environ["PATH"] = os.pathsep.join([importlib.import_module("ninja").BIN_DIR, before])
    try:
        yield
    finally:
        os.environ["PATH"] = before


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """One process builds at a time. torch's own lock file outlives a build that was killed, and everyone waits for ever."""
    with open(folder / "ds_memo.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # ends with the process
        with suppress(FileNotFoundError):
            (folder / "lock").unlink()
        yield


@contextmanager
def _compiler_of_one_word(folder: Path) -> Iterator[None]:
    """torch 2.13 and later take $CXX for one word; "ccache g++" gets a script."""
    words = os.environ.get("CXX", "")
    if len(shlex.split(words)) > 1:
        script = folder / "compiler"
        script.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        script.chmod(0o755)
        os.environ["CXX"] = str(script)
    try:
        yield
    finally:
        if words:
            os.environ["CXX"] = words


def register() -> None:
    """Make the op appear in DeepSpeed's table, and so in its op report."""
    from deepspeed.ops.op_builder import all_ops

    builder = AllocatorBuilder()
    all_ops.ALL_OPS.setdefault(builder.name, builder)


def main() -> None:
    from deepspeed import env_report
    from deepspeed.git_version_info import installed_ops

    register()
    builder = AllocatorBuilder()
    installed_ops[builder.name] = builder._installed() is not None
    env_report.op_report(verbose=False)
    print(f"{builder.name}: {'; '.join(builder.missing()) or 'nothing is missing'}")


if __name__ == "__main__":
    main()
