"""The benchmarks. Each command is `python -m benchmarks.NAME`; docs/benchmarks.md lists them.

cpu/        on a CPU: memory, planner, overhead, convergence
gpu/        on a GPU, against every rival, by `bash benchmarks/gpu.sh`
emulator/   on an emulated CUDA device: bytes, calls and order are real, values and times are not
paper/      the estimator beside the MEMO paper and published runs; what it says of known models
results/    measurements as JSON

The folders sort files by subject. Python finds all of them as `benchmarks.NAME`, so that commands keep their names.
"""

from pathlib import Path

__path__ += [str(Path(__file__).parent / folder) for folder in ("cpu", "gpu", "emulator", "paper")]
