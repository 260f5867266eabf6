"""The kernel of attention on which an estimate stands: the one that a run has, at its own rate."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ds_memo.attention_kernel import CUDNN, EFFICIENT, FA3, FLASH
from ds_memo.cli import main as cli
from ds_memo.estimate import hardware
from ds_memo.estimate.errors import EstimateError
from ds_memo.estimate.estimate import estimate
from ds_memo.estimate.hardware import AttentionRates, Hardware
from ds_memo.estimate.model import from_config, load
from ds_memo.estimate.question import Estimate, Question
from tests.estimate.models import GPT_7B, LLAMA_8B, SMALL, small

H100, A800, B200 = (hardware.load(name) for name in ("h100", "a800", "b200"))
KI = 1024


def ask(machine: Hardware, model: str = str(LLAMA_8B), tokens: int = 128 * KI, **asked: object) -> Estimate:
    known = load(model) if model.endswith(".json") else small(model)
    return estimate(Question(known, machine, 8, tokens, tile_tokens=0, **asked))


def names(found: Estimate) -> list[str]:
    return [kernel.name for kernel in found.attention]


def test_a_kernel_that_is_forced_shows_as_a_longer_step() -> None:
    chosen, flash, third = (ask(H100.attending_with(kernel)) for kernel in (None, "flash", "flash_attn_3"))
    assert (names(chosen), names(flash), names(third)) == ([CUDNN], [FLASH], [FA3])
    assert third.step_s < chosen.step_s < flash.step_s
    layers, flops = 32, 2 * (128 * KI) ** 2 * 4096 / 8
    rates = [dict(H100.attention_kernels)[name] for name in (FLASH, CUDNN)]
    longer_s = [layers * flops * (1 / of.forward + 2.5 / of.backward) for of in rates]
    assert flash.step_s - chosen.step_s == pytest.approx(longer_s[0] - longer_s[1], rel=0.01)


def test_windows_and_wide_heads_run_another_kernel() -> None:
    assert names(ask(H100, "gpt_oss")) == [CUDNN, FLASH]
    assert names(ask(H100.attending_with("flash_attn_3"), "gpt_oss")) == [FA3]
    wide = from_config(SMALL["qwen3"] | {"head_dim": 256}, "wide")
    assert names(estimate(Question(wide, H100, 8, KI))) == [FLASH]


def test_kernels_that_cannot_serve_or_have_no_rate_are_refused() -> None:
    with pytest.raises(EstimateError, match=r"flash_attn_3 on a800: FlashAttention-3 cannot: it is not made for .* 8\.0"):
        A800.attending_with("flash_attn_3")
    with pytest.raises(EstimateError, match="flash_attn_4 on b200: its rate is not known, those of cudnn are"):
        B200.attending_with("flash_attn_4")


def test_a_rate_that_is_not_known_is_told() -> None:
    found = ask(B200, "gpt_oss")
    assert "the rate of attention's kernel flash on b200 is not known: it has that of cudnn" in found.notes
    assert H100.attention_rates(EFFICIENT) == H100.attention_rates(FLASH) == AttentionRates(335e12, 322e12)
    assert not ask(H100, "gpt_oss").notes


def test_a_file_without_kernels_has_one_rate() -> None:
    one = replace(H100, attention_kernels=(), compute_capability=0.0)
    assert names(ask(one)) == [FLASH] and not ask(one).notes
    asked = ask(one.attending_with("cudnn"))
    assert names(asked) == [CUDNN] and asked.step_s == ask(one).step_s
    assert asked.notes == ("h100 has one rate for all attention kernels",)


def test_rates_by_kernel_need_the_card_s_compute_capability(tmp_path: Path) -> None:
    """Else an H100 would be taken for a card on which PyTorch runs FlashAttention-2."""
    data = json.loads((Path(hardware.__file__).parent / "hardware_data" / "h100.json").read_text())
    del data["compute_capability"]
    (file := tmp_path / "mine.json").write_text(json.dumps(data))
    with pytest.raises(EstimateError, match="missing compute_capability"):
        hardware.load(str(file))


def test_the_command_names_the_kernel_and_its_rates(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["estimate", "--model", str(GPT_7B), "--hardware", "h100", "--gpus", "8", "--seq-length", "64K", "--tile-tokens", "0"]
    assert cli.main([*words, "--attention", "flash_attn_2"]) == 0
    told = "attention  FlashAttention-2 at 335 and 322 TFLOP/s, forward and backward: memo.attention names it\n"
    assert told in capsys.readouterr().out
    assert cli.main([*words, "--json"]) == 0
    (kernel,) = json.loads(capsys.readouterr().out)["attention"]
    assert (kernel["kernel"], kernel["forward_tflops"], kernel["backward_tflops"]) == (CUDNN, 539, 516)
