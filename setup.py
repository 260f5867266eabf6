"""Everything is in setup.cfg; this compiles the C++ ahead of time where DS_BUILD_MEMO_OPS=1 asks for it."""

import os
import sys
import sysconfig

from setuptools import setup

options = {}
if os.environ.get("DS_BUILD_MEMO_OPS") == "1":
    # The op must be compiled against the torch that will load it, the one installed here; pip's isolated build hides that one.
    sys.path += [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    try:
        from torch.utils.cpp_extension import BuildExtension

        from ops.builder import OpsBuilder
    except ImportError as error:
        sys.exit(f"DS_BUILD_MEMO_OPS=1 needs torch and deepspeed to be installed first: {error}")
    builder = OpsBuilder()
    if not builder.is_compatible(verbose=True):
        sys.exit(f"{builder.name} cannot be compiled here: {builder.error_log}")
    options = {"ext_modules": [builder.builder()], "cmdclass": {"build_ext": BuildExtension}}

setup(**options)
