"""Text form of the costs of the microbatches of several steps."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from megatron_ext.schedule.dealing import Costs
from megatron_ext.words import counted, shown

DRAWN_STEPS = 20
_LOGNORMAL = "lognormal:"
_EXAMPLE = "write lognormal:0.5, or the path of a file with a cost per line"


def parse_microbatch_costs(text: str, per_step: int) -> Costs:
    """Return costs whose mean is 1: a row per step, with ``per_step`` microbatches.

    Args:
        text: ``lognormal:0.5`` draws the costs of 20 steps, with this standard deviation as a share
            of their mean. A file has one cost per line, step after step; costs behind the last
            whole step are ignored.

    Raises:
        ValueError: ``text`` is neither, a cost is no positive number, or there are fewer than
            ``per_step`` costs.
    """
    if text.startswith(_LOGNORMAL):
        return _drawn(text, per_step)
    costs = _read(Path(text))
    if len(costs) < per_step:
        raise ValueError(
            f"{shown(text)} has {counted(len(costs), 'cost')}, and the replicas of one step have "
            f"{counted(per_step, 'microbatch')}: give at least as many costs"
        )
    whole = np.array(costs[: len(costs) // per_step * per_step]).reshape(-1, per_step)
    return whole / whole.mean()


def _drawn(text: str, per_step: int) -> Costs:
    figure = text.removeprefix(_LOGNORMAL)
    try:
        deviation = float(figure)
    except ValueError:
        deviation = math.nan
    if not 0 <= deviation <= 10:
        raise ValueError(
            f"microbatch costs {shown(text)!r}: {shown(figure)!r} is no number from 0 to 10; "
            f"{_EXAMPLE}"
        )
    return lognormal(np.random.default_rng(0), deviation, (DRAWN_STEPS, per_step))


def lognormal(rng: np.random.Generator, deviation: float, size: tuple[int, int]) -> Costs:
    """Return random numbers whose mean is 1 and whose standard deviation is ``deviation``."""
    variance = math.log1p(deviation**2)
    return np.exp(rng.standard_normal(size) * math.sqrt(variance) - variance / 2)


def _read(file: Path) -> list[float]:
    if not file.is_file():
        raise ValueError(f"microbatch costs {shown(str(file))!r} are no file; {_EXAMPLE}")
    costs = []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no text; {_EXAMPLE}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            cost = float(line)
        except ValueError:
            cost = math.nan
        if not 0 < cost < math.inf:
            raise ValueError(
                f"{file}, line {number}: {shown(line.strip())!r} is no positive number; {_EXAMPLE}"
            )
        costs.append(cost)
    return costs
