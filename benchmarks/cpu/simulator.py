"""Durations of the simulator against the real engine's on CPU threads: python -m benchmarks.simulator [--runs N]

Twenty random configurations with throttled copies (tests/estimate/threaded.py). The order of events is a test; how long things
took is this table. Compute sleeps, so the machine's speed does not matter; how late it wakes a sleeper does.
"""

from __future__ import annotations

import argparse
import statistics

from ds_memo.swap.stream_protocol import D2H, H2D
from tests.estimate.threaded import Configuration, clear_configurations, measured_events, mismatch, predicted_events


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="of each configuration; medians are shown (default: %(default)s)")
    runs = parser.parse_args().runs
    print(
        f"{'layers':>6} {'alpha':>5} {'resident':>8} | {'step ms':>8} {'measured':>8} | {'d2h stall':>9} {'measured':>8}", end=""
    )
    print(f" | {'h2d stall':>9} {'measured':>8} | order")
    off, total = [], []
    for seed in clear_configurations():
        configuration = Configuration.random(seed)
        predicted = configuration.predicted()
        steps, stalls, same = [], {D2H: [], H2D: []}, 0
        for _ in range(runs):
            events, streams = measured_events(configuration)
            steps.append(next(event.at for event in events if event.name == "the end"))
            same += mismatch(predicted_events(predicted), events) is None
            for stream, seconds in streams.stall_s().items():
                stalls[stream].append(seconds)
        step, d2h, h2d = (1e3 * statistics.median(values) for values in (steps, stalls[D2H], stalls[H2D]))
        off.append(abs(step / (1e3 * predicted.seconds) - 1))
        total.append(abs(d2h + h2d - 1e3 * (predicted.d2h_stall_s + predicted.h2d_stall_s)))
        print(
            f"{len(configuration.run.layers):6d} {configuration.alpha:5.2f} {len(configuration.residents):8d} | "
            f"{1e3 * predicted.seconds:8.1f} {step:8.1f} | {1e3 * predicted.d2h_stall_s:9.1f} {d2h:8.1f} | "
            f"{1e3 * predicted.h2d_stall_s:9.1f} {h2d:8.1f} | {same} of {runs}"
        )
    print(
        f"\nstep: {statistics.mean(off):.1%} off on average, {max(off):.1%} at most; stalls: {statistics.mean(total):.1f} ms off"
    )


if __name__ == "__main__":
    main()
