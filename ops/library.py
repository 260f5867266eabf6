"""The library of ds_memo's C++: the allocator op and the follower of recipes. It is compiled at first use, or ahead of time.

    DS_BUILD_MEMO_OPS=1 pip install .                # ahead of time; else it is compiled at first use (some 20 s, once)

There is one for each kind of device, of the same parts. Both need a C++20 compiler; cuda's needs the CUDA runtime headers too,
but no nvcc. ds_memo/compiled.py caches a library that was compiled at first use; an installed one is trusted like any package.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import sysconfig
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

from ds_memo import compiled
from ds_memo.compiled import Library, Unavailable
from ds_memo.errors import warn

SOURCES = Path(__file__).resolve().parent / "csrc"
BACKENDS = ("cpu", "cuda")
TOOLKITS = ("/usr/local/cuda",)
"""Folders that torch does not search if another nvcc is on the PATH."""
CXX_FLAGS = ("-O3", "-std=c++20", "-fvisibility=hidden")
_loaded: dict[str, ModuleType] = {}
"""By backend."""


def name_of(backend: str) -> str:
    return f"memo_ops_{backend}"


def import_name(backend: str) -> str:
    """Return the name that an installed library is imported by."""
    return f"ds_memo.ops.{name_of(backend)}_op"


def load(backend: str, warn: Callable[[str], None] = warn) -> ModuleType:
    """Return the library, installed ahead of time or compiled now.

    Args:
        backend: "cpu" or "cuda".
        warn: called with the reason if the cache of compiled libraries cannot be used.

    Raises:
        Unavailable: it cannot be compiled here; the message has the missing tools, or the compiler's error.
    """
    if backend not in _loaded:
        _loaded[backend] = installed(backend) or _compiled(backend, warn)
    return _loaded[backend]


def installed(backend: str) -> ModuleType | None:
    """Return the library that was built ahead of time, or None. DeepSpeed's table of installed ops does not list it."""
    if importlib.util.find_spec(import_name(backend)) is None:
        return None
    try:
        module = importlib.import_module(import_name(backend))
    except ImportError:  # of another torch: its symbols are not there
        return None
    return module if torch.__version__.startswith(module.TORCH_VERSION) else None


def _compiled(backend: str, warn: Callable[[str], None]) -> ModuleType:
    if lacks := missing(backend):
        raise Unavailable(f"{name_of(backend)} is not available: {'; '.join(lacks)}")
    return compiled.load(library(backend), functools.partial(_imported, name_of(backend)), warn=warn)


def _imported(name: str, path: str) -> ModuleType:
    loader = ExtensionFileLoader(name, path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    loader.exec_module(module)
    return module


def missing(backend: str) -> list[str]:
    """Return a message for each missing build tool."""
    if backend not in BACKENDS:
        return [f"there are no ops for {backend!r} devices, only for {' and '.join(BACKENDS)}"]
    lacks = []
    try:
        compiled.compiler()
    except Unavailable as error:
        lacks.append(str(error))
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        lacks.append("no Python.h (install the python3-dev package)")
    if backend == "cuda":
        if torch.version.cuda is None:
            lacks.append(f"torch {torch.__version__} is built without CUDA")
        if cuda_headers() is None:
            lacks.append(
                "no cuda_runtime_api.h with crt/host_defines.h (looked in $CUDA_HOME/include, /usr/local/cuda/include "
                "and the nvidia and triton packages; install the CUDA toolkit, or pip install triton)"
            )
    return lacks


def source(backend: str) -> Path:
    return SOURCES / f"ops_{backend}.cpp"


def include_paths(backend: str) -> list[str]:
    headers = cuda_headers() if backend == "cuda" else None
    return [str(SOURCES), *([str(headers)] if headers else [])]


def link_flags(backend: str) -> list[str]:
    # The CUDA runtime comes with libc10_cuda; linking it once more could bring in a second one.
    return ["-lc10_cuda"] if backend == "cuda" else []


def library(backend: str) -> Library:
    """Return the sources and flags of the library that is compiled at first use."""
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    own = [f"-I{folder}" for folder in include_paths(backend)]
    others = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    flags = ["-shared", "-fPIC", *CXX_FLAGS, f"-DTORCH_EXTENSION_NAME={name_of(backend)}", abi, *own]
    links = [*link_flags(backend), "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    return Library(
        name_of(backend),
        source(backend),
        flags=(*flags, *(word for folder in others for word in ("-isystem", folder))),
        links=(*(f"-L{folder}" for folder in cpp_extension.library_paths()), *links),
        headers=tuple(sorted(SOURCES.glob("*.h"))),
        made_for=torch.__version__,
    )


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
