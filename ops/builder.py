"""OpsBuilder: ds_memo's C++ library as one of DeepSpeed's ops.

python -m ds_memo.ops.builder                    # DeepSpeed's op report with this op; lists missing build tools
"""

from __future__ import annotations

from types import ModuleType

from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.builder import OpBuilder
from torch.utils import cpp_extension

from ds_memo.ops import library


class OpsBuilder(OpBuilder):
    """Builds the library for one kind of device.

    Args:
        backend: "cpu" or "cuda"; None: that of DeepSpeed's accelerator.
    """

    BUILD_VAR = "DS_BUILD_MEMO_OPS"

    def __init__(self, backend: str | None = None) -> None:
        self.backend = backend or get_accelerator().device_name()
        super().__init__(name=library.name_of(self.backend))

    def absolute_name(self) -> str:
        return library.import_name(self.backend)

    def sources(self) -> list[str]:
        return [str(library.source(self.backend))]

    def builder(self) -> cpp_extension.CppExtension:
        return cpp_extension.CppExtension(
            name=self.absolute_name(),
            sources=self.sources(),
            include_dirs=library.include_paths(self.backend),
            extra_compile_args={"cxx": list(library.CXX_FLAGS)},
            extra_link_args=library.link_flags(self.backend),
        )

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return True if the op can be compiled here. `error_log` lists missing tools; `verbose` prints them."""
        missing = library.missing(self.backend)
        self.error_log = "; ".join(missing) or None
        if missing and verbose:
            self.warning(f"{self.name}: {self.error_log}")
        return not missing

    def load(self, verbose: bool = False) -> ModuleType:
        """Return the library; see :func:`ds_memo.ops.library.load`."""
        return library.load(self.backend)


def main() -> None:
    from deepspeed import env_report
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder import all_ops

    builder = OpsBuilder()
    all_ops.ALL_OPS.setdefault(builder.name, builder)
    installed_ops[builder.name] = library.installed(builder.backend) is not None
    env_report.op_report(verbose=False)
    print(f"{builder.name}: {'; '.join(library.missing(builder.backend)) or 'nothing is missing'}")


if __name__ == "__main__":
    main()
