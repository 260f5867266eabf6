"""The tiled loss under ZeRO 0 to 3, tied and untied, on two ranks with gradient accumulation."""

from pathlib import Path

from launcher import run_ranks


def test_every_stage_gives_the_stock_gradients():
    printed = run_ranks(Path(__file__).parent / "zero_worker.py", ranks=2, timeout_s=300)
    assert printed.count(": ok") == 2 * 4 * 2
