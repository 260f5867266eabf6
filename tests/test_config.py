"""The "memo" section: every refused value is named with what is allowed, and nothing is coerced."""

from __future__ import annotations

from typing import Any

import pytest

import ds_memo
from ds_memo.config import MemoConfig, memo_config

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"enabled": 1}, r"memo\.enabled: got 1; allowed: true or false"),
    ({"alpha": -0.1}, r"memo\.alpha: got -0\.1; allowed: a number from 0 to 1"),
    ({"alpha": "auto"}, r"memo\.alpha: got 'auto'.*leave the key out"),
    ({"alpha": float("nan")}, r"memo\.alpha: got nan"),
    ({"resident_layers": -1}, r"memo\.resident_layers: got -1; allowed: a whole number from 0"),
    ({"resident_layers": True}, r"memo\.resident_layers: got True"),
    ({"host_memory_gib": 0}, r"memo\.host_memory_gib: got 0; allowed: a number of GiB above 0"),
    ({"attention": "math"}, r"memo\.attention: got 'math'; allowed: \"cudnn\", \"flash\", \"flash_attn_2\""),
    ({"layers": "blocks"}, r"memo\.layers: got 'blocks'; allowed: a list of module names"),
    ({"kernels": {"norm": "liger"}}, r"memo\.kernels\.norm: got 'liger'; allowed: \"torch\" or \"apex\""),
    ({"kernels": {"adm": "apex"}}, r"memo\.kernels\.adm: unknown key; allowed here: fast, norm, adam, cross_entropy"),
    ({"plan": True}, r"memo\.plan: got True; allowed: a JSON object"),
    ({"plan": {"solver": "gurobi"}}, r"memo\.plan\.solver: got 'gurobi'; allowed: \"cbc\", \"highs\" or \"greedy\""),
    ({"plan": {"time_limit_s": 0}}, r"memo\.plan\.time_limit_s: got 0; allowed: a number of seconds above 0"),
    ({"cache_dir": ""}, r"memo\.cache_dir: got ''; allowed: a path"),
    ({"plan": {"sover": "cbc"}}, r"memo\.plan\.sover: unknown key; allowed here: enabled, solver, time_limit_s$"),
    ({"profile": {"method": "guess"}}, r"memo\.profile\.method: got 'guess'; allowed: \"fit\" or \"direct\""),
    ({"Alpha": 0.5}, r"memo\.Alpha: unknown key; allowed here: enabled, alpha, resident_layers"),
    ({"device_memory_gib": 1e308}, r"memo\.device_memory_gib: got 1e\+308; allowed: a number of GiB above 0, at most 1,048,576"),
    ({"host_memory_gib": 10**400}, r"memo\.host_memory_gib: got 1000.*at most 1,048,576"),
    ({"resident_layers": 10**5000}, r"memo\.resident_layers: got "),
    ({"tile_tokens": 2**32 + 1}, r"memo\.tile_tokens: got 4294967297; .* from 0 to 4,294,967,296 "),
    ({"head_groups": 2**16 + 1}, r"memo\.head_groups: got 65537; .* from 1 to 65,536 "),
    ({"ulysses_size": 0}, r"memo\.ulysses_size: got 0; .*a divisor of sequence_parallel_size"),
    ({"resident_layers": 2**16 + 1}, r"memo\.resident_layers: got 65537; .*at most 65,536 "),
    ({"plan": {"time_limit_s": 1e9}}, r"memo\.plan\.time_limit_s: got 1000000000\.0; .*at most 1,000,000"),
    ({"cache_dir": "~nosuchuser/x"}, r"memo\.cache_dir: got '~nosuchuser/x' .*; allowed: a path"),
    ({"cache_dir": "a\0b"}, r"memo\.cache_dir: got 'a\\x00b' .*NUL"),
    ({"cache_dir": "\udfff/\ud800"}, r"memo\.cache_dir: got "),
    ({"\ud800": 1}, r"memo: got .*Unicode text"),
    ({"a\x1b[31m\n": 1}, r"memo\.a\\x1b\[31m\\n: unknown key"),
]


@pytest.mark.parametrize("section, message", REFUSED, ids=range(len(REFUSED)))
def test_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ds_memo.MemoConfigError, match=message):
        memo_config(section)


@pytest.mark.parametrize("section", [None, [], "on", 3, True])
def test_a_section_that_is_no_object(section: Any) -> None:
    with pytest.raises(ds_memo.MemoConfigError, match='"memo" must be a JSON object, got '):
        memo_config(section)


def test_every_wrong_field_is_named_at_once() -> None:
    with pytest.raises(ds_memo.MemoConfigError) as caught:
        memo_config({"alpha": 2, "resident_layers": -1, "plan": {"solver": "x"}, "nonsense": 1})
    assert len(str(caught.value).splitlines()) == 4


@pytest.mark.parametrize(
    "section",
    [
        {"x" * 10**6: 1},
        {"alpha": "x" * 10**6},
        {f"k{number}": 1 for number in range(10_000)},
        ["x" * 10**6],
    ],
    ids=["a key", "a value", "keys", "no object"],
)
def test_an_error_is_short(section: Any) -> None:
    with pytest.raises(ds_memo.MemoConfigError) as caught:
        memo_config(section)
    assert len(str(caught.value)) < 4000


def test_an_error_about_a_value_that_holds_itself_twice() -> None:
    """Its repr has 2^40 brackets."""
    value: list[Any] = []
    for _ in range(40):
        value = [value, value]
    with pytest.raises(ds_memo.MemoConfigError, match=r"memo\.alpha: got \[\["):
        memo_config({"alpha": value})


def test_an_error_of_two_kinds() -> None:
    assert issubclass(ds_memo.MemoConfigError, ValueError)
    assert issubclass(ds_memo.MemoConfigError, ds_memo.MemoError)


def test_taken() -> None:
    config = memo_config({"enabled": True, "alpha": 1, "resident_layers": 0, "host_memory_gib": 3, "attention": "flash"})
    assert (config.alpha, config.resident_layers, config.host_memory_gib) == (1.0, 0, 3.0)
    assert memo_config(config) is config


def test_defaults() -> None:
    config = memo_config({})
    assert config == MemoConfig()
    assert (config.enabled, config.alpha, config.resident_layers, config.attention) == (False, None, None, None)
    assert (config.plan.enabled, config.plan.solver, config.profile.method) == (True, "cbc", "fit")


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ds_memo.MemoConfigError) as refused:
        memo_config({"nvme": {"paht": "/tmp"}})
    assert str(refused.value).splitlines() == [
        "memo.nvme.paht: unknown key; allowed here: path, gib, max_tb_per_day",
        "memo.nvme.path: missing; expected: a directory that exists, or a list of them",
    ]
