"""Everything that is measured. Each command is `python -m benchmarks.NAME`; README.md lists them.

cpu/        on a CPU: memory, planner, solver, overhead, convergence
gpu/        on a GPU, beside every rival, by `bash benchmarks/gpu.sh`
emulator/   on an emulated CUDA device: bytes, calls and order are real, values and times are not
paper/      beside the tables of the MEMO paper, and its own method as a rival
results/    what was measured, as JSON

The folders sort files for people; to Python all of them are `benchmarks.NAME`.
"""

from pathlib import Path

__path__ += [str(Path(__file__).parent / folder) for folder in ("cpu", "gpu", "emulator", "paper")]
