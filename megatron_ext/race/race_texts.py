"""Texts of a race: while it runs, when it is over, and a row of a table to show to others.

A winner is an invitation to publish a number. So the texts name the machine and the versions, the
spread next to the gain, and a doubt if a gain is too large to be the schedule's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from megatron_ext.base.words import bytes_text, counted
from megatron_ext.compile.contestants import Contestants
from megatron_ext.race.race_record import NAME, RaceFigures
from megatron_ext.race.rounds import ROUNDS, Race


def standing(race: Race) -> str:
    """Return a line about the standing of a race's candidates after a round."""
    words = []
    for spec in (*race.candidates, *race.dropped):
        ratio = race.ratio(spec)
        if spec in race.dropped:
            words.append(f"{spec} is dropped ({race.dropped[spec]})")
        elif ratio is not None:
            words.append(f"{spec} {ratio.median:.3f}")
    speed = f"speed relative to {race.baseline} (median so far)"
    return f"race, round {len(race.rounds)} of {ROUNDS}, {speed}: {', '.join(words)}"


def winner_text(race: Race, takes_winner: bool) -> str:
    """Return a line with the winner of a race, and the schedule under which the training goes
    on."""
    best = race.best
    closest = "" if best is None else f"{best} is {_pace(race, best)}"
    if race.winner != race.baseline:
        then = "and is kept" if takes_winner else f"the training goes on under {race.baseline}"
        return f"race is over: {closest}, {then}"
    why = f": {closest}" if closest else ""
    return f"race is over: no schedule is faster than {race.baseline}, which is kept{why}"


def _pace(race: Race, spec: str) -> str:
    ratio = race.ratio(spec)
    assert ratio is not None
    return (
        f"{ratio.median:.3f} times as fast as {race.baseline} (quartiles {ratio.spread}, "
        f"{counted(ratio.rounds, 'round')})"
    )


def doubt_of_winner(race: Race, figures: Mapping[str, RaceFigures]) -> str | None:
    """Return why the winner's schedule alone cannot gain so much, and what to do; None if it can.

    A schedule takes bubbles away and nothing else: without any, the baseline's passes would take
    ``1 - bubble`` of their time, and the rest of an iteration as long as it does now.
    """
    ratio, baseline = race.ratio(race.winner), figures.get(race.baseline)
    if ratio is None or baseline is None:
        return None
    known = {"measured": baseline.bubble, "predicted": baseline.predicted_bubble}
    for origin, bubble in known.items():
        if bubble is None:
            continue
        possible = 1 / (1 - bubble) if bubble < 1 else math.inf
        if race.winner != race.baseline and ratio.median > possible:
            return (
                f"race: {ratio.median:.3f} times as fast is noise, at least in part: "
                f"{race.baseline} without its whole bubble ({bubble:.1%} {origin}) would be "
                f"{possible:.3f} times as fast. Something else used the processors, GPUs or "
                f"network while others had their turns, or passes are too short to be timed: race "
                f"again where nothing else runs, with a model of real size, after removing {NAME} "
                f"from the folder of --save; until then write --pipeline-race-then report"
            )
    return None


def figures_line(spec: str, race: Race, figures: RaceFigures) -> str:
    """Return a line of the log: the measured and the predicted times of schedule ``spec``."""
    seconds = race.seconds(spec)
    took = "" if seconds is None else f"iteration {seconds * 1e3:.4g} ms, "
    of_bubble = _predicted(figures)
    if figures.predicted_bubble is not None:
        of_bubble = f"predicted {of_bubble}"
    return (
        f"race, {spec}: {took}bubble {figures.bubble:.1%} ({of_bubble}), peak "
        f"{_bytes(figures.peak)} (predicted {_bytes(figures.predicted_peak)}, "
        f"{counted(figures.peak_microbatches, 'microbatch')})"
    )


def table(
    race: Race,
    contestants: Contestants,
    facts: Mapping[str, str],
    figures: Mapping[str, RaceFigures],
) -> str:
    """Return a Markdown table with one row, of the best candidate: the schedules compared, the
    system, and the result. "" if no candidate has run a whole round."""
    best = race.best
    ratio = None if best is None else race.ratio(best)
    if best is None or ratio is None:
        return ""
    best_figures = figures[best]
    columns = {
        **facts,
        "baseline": f"{race.baseline} ({contestants.order_of_baseline})",
        "schedule": best,
        "times as fast": f"{ratio.median:.3f} ({ratio.spread})",
        "bubble (predicted)": f"{best_figures.bubble:.1%} ({_predicted(best_figures)})",
        "peak (predicted)": f"{_bytes(best_figures.peak)} ({_bytes(best_figures.predicted_peak)})",
    }
    return "\n".join(
        f"| {' | '.join(cells)} |" for cells in (columns, ["-"] * len(columns), columns.values())
    )


def _predicted(figures: RaceFigures) -> str:
    """Return the predicted bubble in words."""
    bubble = figures.predicted_bubble
    return "no estimate" if bubble is None else f"{bubble:.1%}"


def _bytes(number: float | None) -> str:
    return "unknown" if number is None else bytes_text(number)
