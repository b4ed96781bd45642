"""Text form of the noise of passes, and texts on a step's duration under it.

Passes never take exactly the seconds of their costs, so a predicted step is the middle of a range.
Users describe the noise in a few words, or with a trace, and read the range in a few rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from megatron_ext.base.words import shown
from megatron_ext.compile.program.noise import Noise, Spread
from megatron_ext.observe.trace import TracedStep, read_trace

_EXAMPLE = "write 0.1, or 0.1,ranks=0.05, or the path of a trace of a training run"
_RANKS = "ranks="


def parse_noise(text: str) -> Noise:
    """Return the random variation of pass times that ``text`` describes.

    ``0.1`` is the standard deviation of a pass's seconds, as a share of them. ``0.1,ranks=0.05``
    adds the standard deviation of a factor that all passes of a rank share in a step. Otherwise
    ``text`` is the file or folder of a trace.

    Raises:
        ValueError: ``text`` is none of these, or a share is more than 1.
    """
    passes, *more = (part.strip() for part in text.split(","))
    if not _is_number(passes):
        if not text.strip():
            raise ValueError(f"noise {shown(text)!r} is empty; {_EXAMPLE}")
        return noise_of(read_trace(Path(text)))
    ranks = 0.0
    if more:
        if len(more) > 1 or not more[0].startswith(_RANKS):
            raise ValueError(
                f"noise {shown(text)!r}: {shown(','.join(more))!r} is unknown; {_EXAMPLE}"
            )
        ranks = _share(more[0].removeprefix(_RANKS), text)
    return Noise(_share(passes, text), ranks)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _share(figure: str, text: str) -> float:
    """Return the number in the text ``figure``, from 0 to 1, or raise ValueError."""
    if not _is_number(figure) or not 0 <= float(figure) <= 1:
        raise ValueError(
            f"noise {shown(text)!r}: {shown(figure)!r} is no number from 0 to 1; {_EXAMPLE}"
        )
    return float(figure)


def noise_of(steps: Sequence[TracedStep]) -> Noise:
    """Return the variation of pass times in traced ``steps``.

    It has each pass's seconds relative to the mean of its kind and stage.
    """
    groups = defaultdict(list)
    for event in (event for step in steps for row in step.measured.compute for event in row):
        groups[event.action.kind, event.action.stage].append(event.end - event.start)
    means = {key: mean(seconds) for key, seconds in groups.items()}
    return Noise(
        measured=tuple(
            seconds / means[key] for key, group in groups.items() if means[key] for seconds in group
        )
    )


def rows_of_spread(spread: Spread) -> dict[str, str]:
    """Return the printed rows on a step's makespan and span with noise, by name."""
    return {
        f"{name} with noise": f"median {figures.median:.6g}, 90% of steps within {figures.p90:.6g}"
        for name, figures in (("makespan", spread.makespan), ("span", spread.span))
    }
