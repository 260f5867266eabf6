"""Print a run's report: for `ds-memo report FILE`, and for `print(ds_memo.report(…))`.

ds_memo          active: 6 layers, 2 of them resident, alpha 0.5
set by           host memory: 0.0128 of 9.13 GiB at alpha 0.5
layers 0-3         3.3 MiB each, on the host       ██████████████████
layers 4-5         5.5 MiB each, on the device     ██████████████████████████████
…
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from ds_memo.errors import MemoError, quoted
from ds_memo.files import read_text
from ds_memo.units import size

_BYTES_OF = {
    "frames": "frames on the device",
    "reload_buffers": "reload buffers",
    "layer": "one layer",
    "forward": "forward",
    "head": "head and loss",
    "backward": "backward",
    "always": "other streams",
    "non_layer": "non-layer memory",
}
"""Parts of the predicted device bytes, by the report's keys."""
_OTHERS = {"layers_without_gemms": "without GEMMs", "layers_without_recompute": "without recompute"}
"""Layers on the device that are not resident, by the report's key."""
_BAR = 30
MOST_REPORT_BYTES = 1 << 26
"""Most bytes of a report, or of a run's metrics, which hold it and one entry per step."""
MOST_LINE = 2000
"""Most characters of a table's line."""


class ReportError(MemoError, ValueError):
    """A file that holds no report; the message says why."""


class Report(dict):
    """The dict that ``ds_memo.report`` returns; ``print`` shows it as a table."""

    def __str__(self) -> str:
        return as_text(self)


def as_text(report: Mapping[str, Any]) -> str:
    """Return the report as a table of about fifteen lines."""
    return "\n".join(f"{quoted(name):<16} {quoted(text, MOST_LINE)}" for name, text in _lines(report))


def budget_in_words(budget: Mapping[str, Any]) -> str:
    """Return the device's bytes that a pass was solved for, and what of the free bytes was withheld, and why."""
    to_come = f", {size(budget['to_come'])} for gradients and optimizer states to come" if budget["to_come"] else ""
    withheld = f", {size(budget['withheld'])} withheld ({budget['why']})" if budget["why"] else ""
    return f"{size(budget['solved_for'])} of {size(budget['free'])} free{to_come}{withheld}"


def read_report(text: str, name: str) -> Report:
    """Read a report from JSON: the report itself, or metrics of launch/train.py with a key "report".

    Raises:
        ReportError: the text is neither.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{name}: expected JSON ({error})") from None
    report = data.get("report", data) if isinstance(data, dict) else data
    if not isinstance(report, dict):
        raise ReportError(f"{name}: expected a report, or metrics of a run with memo; got {_in_words(data)}")
    if "binding" not in report:
        raise ReportError(f"{name}: this is no report of ds_memo: it has no binding")
    return Report(report)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "report", metavar="FILE.json", help="json.dump(ds_memo.report(engine)), or metrics by launch/train.py; - reads stdin"
    )


def run(args: argparse.Namespace) -> int:
    name = quoted(args.report, 400)
    report = read_report(_stdin() if args.report == "-" else read_text(args.report, MOST_REPORT_BYTES), name)
    try:
        text = as_text(report)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        raise ReportError(f"{name}: a field of the report is not what ds_memo writes ({error!r})") from None
    print(text)
    return 0


def _stdin() -> str:
    content = sys.stdin.buffer.read(MOST_REPORT_BYTES + 1)
    if len(content) > MOST_REPORT_BYTES:
        raise ReportError(f"-: has more than {MOST_REPORT_BYTES:,} bytes, the most that is read")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ReportError(f"cannot read -: {error}") from None


def _lines(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    alpha, residents, layers = report["alpha"], report["resident_layers"], f"{report['layers']} layers"
    if (calls := (report.get("profile") or {}).get("calls", 1)) > 1:
        layers = f"{calls} calls of {layers}"
    if not report.get("checkpointing", True):
        yield "ds_memo", f"plain training: no layer of {report['layers']} is checkpointed"
    else:
        state = "active" if report["active"] else "moved nothing so far"
        at = "not known yet" if alpha is None else f"{alpha:.4g}"
        others = {**_OTHERS, "layers_without_input": "that compute their input"}
        more = "".join(f", {len(report[key])} {words}" for key, words in others.items() if report.get(key))
        yield "ds_memo", f"{state}: {layers}, {residents} of them resident{more}, alpha {at}"
    yield "set by", report["binding"]
    yield from _layers(report)
    yield "over the link", f"{size(report['bytes_to_host'])} to the host, {size(report['bytes_from_host'])} back"
    share = report["gemm_flops_recomputed_fraction"]
    gemms = "GEMMs unknown, for none was seen" if share is None else f"{share:.1%} of the forward's GEMM FLOPs"
    yield "recomputed", f"{gemms}; attention {report['attention_recomputed']} times"
    if kernels := report.get("attention_kernel"):  # reports of before have none
        yield "attention", "; ".join(f"{name}: {reason}" for name, reason in kernels.items())
    if (logits := report.get("logits")) and logits["lazy_calls"]:
        yield "logits", f"lazy in {logits['lazy_calls']} calls of the output head, tiles of {logits['tile_rows']:,} rows"
    if ranks := report.get("sequence"):
        how = f"{ranks['ulysses']} trade heads" + (f", rings of {ranks['ring']}" if ranks["ring"] > 1 else "")
        yield "sequence", f"shared by {ranks['ranks']} ranks: {how}"
    host = report["host"]
    yield "host memory", f"{size(host['slab'])} held, {size(host['peak_used'])} used at most, of {size(host['budget'])}"
    yield "stalls", ", ".join(f"{seconds:.3g} s for {stream}" for stream, seconds in report["stall_s"].items())
    if report.get("step_s") is not None:
        flops = "" if report.get("mfu") is None else f", MFU {report['mfu']:.1%}"
        yield "speed", f"{report['step_s']:.4g} s a step, {report['tokens_per_s']:,.0f} tokens/s of this rank{flops}"
    if predicted := report.get("predicted"):
        device = size(predicted["device_bytes"])
        yield (
            "predicted",
            f"{predicted['layers_s']:.4g} s for the layers of a pass; {size(predicted['host_bytes'])} host, {device} device",
        )
        if budget := predicted.get("device_budget"):  # reports of before have none
            yield "device budget", budget_in_words(budget)
        at_the_peak = predicted.get("device_bytes_by_part", {})  # reports of before have none
        for name, parts in (("at the peak", at_the_peak), ("non-layer memory", predicted["beside_bytes"])):
            if found := [f"{size(parts[part])} {words}" for part, words in _BYTES_OF.items() if parts.get(part)]:
                yield name, ", ".join(found)
    if profile := report.get("profile"):
        rates = (f"{profile[f'{way}_bytes_per_s'] / 1e9:.3g} GB/s {way}" for way in ("d2h", "h2d"))
        source = ", from the cache" if profile["from_cache"] else ""
        yield "profile", f"{profile['method']}{source}; {', '.join(rates)}"
        yield from (("changed", change) for change in profile["changes"])
    if plan := report["plan"]:
        yield from _plan(plan)
    yield from (("warning", warning) for warning in report["warnings"])


def _layers(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield one line per group of neighbours with equal bytes and placement."""
    stored = report["stored_bytes_per_layer"]
    on_device = {layer for key in ("layers_on_device", *_OTHERS) for layer in report.get(key, ())}
    most = max(stored, default=0)
    if min(stored, default=0) < 0:
        raise ValueError("negative stored_bytes_per_layer")
    if not most:
        return
    for (nbytes, stays), group in itertools.groupby(range(len(stored)), lambda layer: (stored[layer], layer in on_device)):
        layers = list(group)
        name = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}-{layers[-1]}"
        where = "on the device" if stays or not report["bytes_to_host"] else "on the host"
        each = "each" if len(layers) > 1 else ""
        yield name, f"{size(nbytes):>9} {each:4} {where:13}  {'█' * round(_BAR * nbytes / most)}"


def _plan(plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if not plan["plans"]:
        yield "addresses", "not planned yet"
        return
    proven = "proven to be the least" if plan["proven"] else f"lower bound {size(plan['lower_bound'])}"
    yield "addresses", f"plan of {size(plan['peak'])}, {proven}; arena {size(plan['arena'])}"
    missed = {reason: count for reason, count in plan["misses"].items() if count}
    requests = plan["hits"] + sum(missed.values())
    why = f" ({', '.join(f'{count} {reason}' for reason, count in missed.items())})" if missed else ""
    yield "", f"{plan['hits']} of {requests} requests had theirs{why}"
    if plan["gave_way"]:
        yield "", f"the arena was freed {plan['gave_way']} times for requests that had no room"


def _in_words(data: Any) -> str:
    return "metrics of a run without memo" if isinstance(data, dict) and "report" in data else f"a {type(data).__name__}"
