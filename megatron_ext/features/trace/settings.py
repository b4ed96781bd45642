"""Settings of a trace: the folder (``--pipeline-trace``) and the iterations
(``--pipeline-trace-iters``).

They only watch a training, so they also act on Megatron's own schedules.
"""

from __future__ import annotations

from typing import Any

from megatron_ext.base.setting import ON_STOCK, FeatureSettings, as_path, flag, setting

_EXAMPLE = f"write {flag('trace')} DIR {flag('trace_iters')} 10:12 to trace 10 and 11"


def _iterations(name: str, text: str) -> range:
    first, _, end = text.partition(":")
    if not (first.isdecimal() and end.isdecimal()):
        raise ValueError(f"{flag(name)} {text} is not A:B with 1 <= A < B; {_EXAMPLE}")
    return range(int(first), int(end))


def _check(config: Any) -> None:
    iterations = config.trace_iters
    if config.trace is None and iterations is not None:
        raise ValueError(
            f"{flag('trace_iters')} has no folder to write to, as {flag('trace')} is missing; "
            f"{_EXAMPLE}"
        )
    if iterations is not None and not 1 <= iterations.start < iterations.stop:
        raise ValueError(
            f"{flag('trace_iters')} {iterations.start}:{iterations.stop} is not A:B with "
            f"1 <= A < B; {_EXAMPLE}"
        )


TRACE_SETTINGS = FeatureSettings(
    {
        "trace": ON_STOCK
        | setting(
            as_path,
            "DIR",
            help="Write DIR/trace.json for Perfetto: measured and predicted times of each pass, "
            "for the pipeline (data-parallel replica) with the last global rank. Without "
            "--pipeline-schedule Megatron's own step is traced, and the log lists the predicted "
            "step times of our schedules. See 'megatron-ext trace DIR'.",
        ),
        "trace_iters": ON_STOCK
        | setting(
            _iterations,
            "A:B",
            help="Training iterations to trace: A to B-1, as Megatron's log counts them. Default: "
            "the fifth to the seventh iteration of the run.",
        ),
    },
    _check,
    only_watches=True,
)
