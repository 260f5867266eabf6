"""AllocatorBuilder: compiles and loads the allocator op, the way DeepSpeed builds its own ops.

    python -m ds_memo.ops.builder                    # DeepSpeed's op report with this op; lists missing build tools
    DS_BUILD_MEMO_ALLOCATOR=1 pip install .          # ahead of time; else it is compiled at first use (some 10 s, once)

The two backends, cpu and cuda, share one core. Both need a C++20 compiler; cuda needs the CUDA runtime headers too, but no nvcc.
ds_memo/compiled.py caches an op that was compiled at first use; an installed op is trusted like any installed package.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sysconfig
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.builder import OpBuilder
from torch.utils import cpp_extension

from ds_memo import compiled
from ds_memo.compiled import Library, Unavailable
from ds_memo.errors import warn

SOURCES = Path(__file__).resolve().parent / "csrc"
BACKENDS = ("cpu", "cuda")
TOOLKITS = ("/usr/local/cuda",)
"""Folders that torch does not search if another nvcc is on the PATH."""


class AllocatorBuilder(OpBuilder):
    """Builds the op for one kind of device.

    Args:
        backend: "cpu" or "cuda"; None: that of DeepSpeed's accelerator.
        warn: called with the reason if the cache of compiled ops cannot be used.
    """

    BUILD_VAR = "DS_BUILD_MEMO_ALLOCATOR"

    def __init__(self, backend: str | None = None, warn: Callable[[str], None] = warn) -> None:
        self._warn = warn
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
        """Return True if the op can be compiled here. `error_log` lists missing tools; `verbose` prints them."""
        missing = self.missing()
        self.error_log = "; ".join(missing) or None
        if missing and verbose:
            self.warning(f"{self.name}: {self.error_log}")
        return not missing

    def missing(self) -> list[str]:
        """Return a message for each missing build tool."""
        if self.backend not in BACKENDS:
            return [f"there is no allocator for {self.backend!r} devices, only for {' and '.join(BACKENDS)}"]
        lacks = []
        try:
            compiled.compiler()
        except Unavailable as error:
            lacks.append(str(error))
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
        """Return the op, installed ahead of time or compiled now.

        Raises:
            Unavailable: it cannot be compiled here; the message has the missing tools, or the compiler's error.
        """
        if self.name not in OpBuilder._loaded_ops:
            OpBuilder._loaded_ops[self.name] = self._installed() or self._compiled()
        return OpBuilder._loaded_ops[self.name]

    def _installed(self) -> ModuleType | None:
        """Return the op that was built ahead of time, or None. DeepSpeed's table of installed ops does not list it."""
        if importlib.util.find_spec(self.absolute_name()) is None:
            return None
        try:
            op = importlib.import_module(self.absolute_name())
        except ImportError:  # of another torch: its symbols are not there
            return None
        return op if torch.__version__.startswith(op.TORCH_VERSION) else None

    def _compiled(self) -> ModuleType:
        if missing := self.missing():
            raise Unavailable(f"{self.name} is not available: {'; '.join(missing)}")
        return compiled.load(self.library(), self._imported, warn=self._warn)

    def library(self) -> Library:
        """Return the sources and flags of the library that is compiled at first use."""
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
        own = [f"-I{folder}" for folder in self.include_paths()]
        others = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
        flags = ["-shared", "-fPIC", *self.cxx_args(), f"-DTORCH_EXTENSION_NAME={self.name}", abi, *own]
        links = [*self.extra_ldflags(), "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
        return Library(
            self.name,
            Path(self.sources()[0]),
            flags=(*flags, *(word for folder in others for word in ("-isystem", folder))),
            links=(*(f"-L{folder}" for folder in cpp_extension.library_paths()), *links),
            headers=tuple(sorted(SOURCES.glob("allocator_*.h"))),
            made_for=torch.__version__,
        )

    def _imported(self, path: str) -> ModuleType:
        loader = ExtensionFileLoader(self.name, path)
        module = importlib.util.module_from_spec(importlib.util.spec_from_loader(self.name, loader))
        loader.exec_module(module)
        return module


def cuda_headers() -> Path | None:
    """Return the folder of the CUDA runtime headers, or None: the toolkit's, or that of a package that torch's CUDA build needs.
    A folder of torch's CUDA version comes first. nvidia's package may lack crt/; triton has all headers, of an older CUDA."""
    folders = [Path(home) / "include" for home in (cpp_extension.CUDA_HOME, *TOOLKITS) if home]
    for package, pattern in (("nvidia", "*/include"), ("triton", "backends/nvidia/include")):
        if spec := importlib.util.find_spec(package):
            for folder in spec.submodule_search_locations or ():
                folders += sorted(Path(folder).glob(pattern))
    needed = ("cuda_runtime_api.h", "crt/host_defines.h")
    complete = [folder for folder in folders if all((folder / name).is_file() for name in needed)]
    major = (torch.version.cuda or "").partition(".")[0]
    return next((folder for folder in complete if _cuda_major(folder) == major), complete[0] if complete else None)


def _cuda_major(headers: Path) -> str:
    found = re.search(r"define CUDART_VERSION\s+(\d+)", (headers / "cuda_runtime_api.h").read_text(errors="replace"))
    return str(int(found[1]) // 1000) if found else ""


def main() -> None:
    from deepspeed import env_report
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder import all_ops

    builder = AllocatorBuilder()
    all_ops.ALL_OPS.setdefault(builder.name, builder)
    installed_ops[builder.name] = builder._installed() is not None
    env_report.op_report(verbose=False)
    print(f"{builder.name}: {'; '.join(builder.missing()) or 'nothing is missing'}")


if __name__ == "__main__":
    main()
