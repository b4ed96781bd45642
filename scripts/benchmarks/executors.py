"""Benchmark of executors on emulated clocks: ours, Megatron's own and torch's.

    python -m scripts.benchmarks.executors --pp 4 -m 8 --schedules "zb-h1 zb-v"

Seconds of a step are medians over the launches; the last column is the time that the host needs for
a pass, measured with passes that take no time. With --post-validation steps follow one another,
with an all-reduce after each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from megatron_ext.schedule.problem import VocabularyParallel
from scripts.benchmarks.harness import arguments, print_table
from scripts.benchmarks.runs import (
    DEFAULT_SCHEDULES,
    STEPS,
    STEPS_IN_A_ROW,
    Setting,
    measure,
)

COLUMNS = (
    *("executor and schedule", "ideal, s", "measured, s", "of ideal", "over Megatron's 1F1B"),
    *("spread", "host, us"),
)


def main(words: Sequence[str] | None = None) -> int:
    given = arguments(
        __doc__,
        words,
        pp=(4, "pipeline ranks"),
        microbatches=(8, "of a step"),
        costs=("f=40,i=40,w=40", "milliseconds per microbatch of a rank"),
        schedules=(DEFAULT_SCHEDULES, "ours to measure"),
        launches=(3, "how often the ranks are started afresh"),
        vocab_parallel=("none", "measure ours with this too; give output_layer=F/I/W in --costs"),
        pairs=(False, "measure ours with passes in pairs too; give overlap_saving= in --costs"),
        post_validation=(False, "measure steps in a row, ours with post-validation too"),
        steps=(0, f"timed in a launch: {STEPS}, or {STEPS_IN_A_ROW} in a row"),
        json=(False, "print all figures as data"),
    )
    setting = Setting(
        given.pp,
        given.microbatches,
        given.costs,
        tuple(given.schedules.split()),
        given.launches,
        VocabularyParallel(given.vocab_parallel),
        given.steps or (STEPS_IN_A_ROW if given.post_validation else STEPS),
        given.post_validation,
        given.pairs,
    )
    measured = measure(setting, lambda text: print(text, file=sys.stderr))
    if given.json:
        print(json.dumps({**asdict(setting), **asdict(measured), "doubts": measured.doubts}))
        return 0
    rows = (
        (
            *(row.name, f"{row.ideal:.3f}", f"{row.measured:.3f}", f"{row.efficiency:.1%}"),
            *(f"{row.speedup:.2f}", f"{row.spread:.1%}", f"{row.host_microseconds:.0f}"),
        )
        for row in measured.rows
    )
    print_table(COLUMNS, rows)
    cold, warm = measured.autograd_microseconds
    print(f"\nautograd alone takes {cold:.0f} us a pass here after a sleep, {warm:.0f} us without")
    for doubt in measured.doubts:
        print(f"not to be believed: {doubt}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
