"""``megatron-ext plan -- LINE``: how a plan for a launch line is printed."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megatron_ext.commands.half_pipeline import NOTHING_FITS, print_halves
from megatron_ext.commands.layout_tables import print_layouts
from megatron_ext.commands.output import fail
from megatron_ext.commands.plan_pictures import PlanPictures
from megatron_ext.commands.plan_tables import (
    print_long_sequences,
    print_memory,
    print_plan,
    print_unit,
    print_vocabulary,
    reserve_text,
)
from megatron_ext.commands.progress import showing_progress
from megatron_ext.config import flag
from megatron_ext.schedule.model.gpus import parse_gpu
from megatron_ext.schedule.plan.plan_report import plan_report
from megatron_ext.schedule.plan.recommendation import made_again, slower_by
from megatron_ext.schedule.planning_time import planning
from megatron_ext.schedule.show.trace import reserved_in
from megatron_ext.schedule.text_file import parse_json, read_text_file
from megatron_ext.schedule.words import bytes_text

if TYPE_CHECKING:
    from megatron_ext.launch_check.alternatives.pairs import OtherPairs
    from megatron_ext.launch_check.alternatives.without_full_recompute import Instead
    from megatron_ext.launch_check.line_plan import Asked, LinePlan
    from megatron_ext.schedule.plan.candidate import Candidate

_EQUAL = 0.02  # of a step: what no estimate tells apart
_WORLD_SIZE = "world_size"  # in a file of arguments


def plan_of_line(
    words: Sequence[str],
    config: Path | None,
    log: Path | None,
    world_size: int | None,
    gpu: str | None,
    trace: Path | None,
    settings: Mapping[str, str | bool | None],
    as_json: bool,
    pictures: PlanPictures,
) -> None:
    """Plan for the launch line ``words``, or the arguments in the file ``config``.

    Args:
        log: of an earlier start, in place of a launch line.
        trace: of that line, on GPUs.
        settings: of ours, beside what the line has.
    """
    from megatron_ext.launch_check.line_plan import plan_line
    from megatron_ext.patches.engine import PatchError

    try:
        pictures.check()
        asked = _asked(words, config, log, world_size, gpu, trace, settings)
        asked = replace(asked, with_curves=pictures.plot is not None)
        with showing_progress(), planning() as time:
            made = plan_line(asked)
        pictures.draw(made.plan, made.curves, is_estimate=settings["costs"] is None)
    except (ValueError, OSError, PatchError) as error:
        fail(error)
    if as_json:
        data = plan_report(made.plan, None).as_data()
        typer.echo(json.dumps({"line": made.as_data(), **data}, indent=2))
    else:
        _print(made, is_estimate=settings["costs"] is None)
    if time.is_short:
        typer.echo(f"{time.why_short}: some of it is left out", err=True)
    if made.plan.best is None:
        fail(ValueError(_what_gives(made)))


def halves_of_line(
    words: Sequence[str],
    config: Path | None,
    log: Path | None,
    world_size: int | None,
    gpu: str | None,
    trace: Path | None,
    settings: Mapping[str, str | bool | None],
    as_json: bool,
    pictures: PlanPictures,
) -> None:
    """The line, and the same on half of its pipeline ranks. Arguments as of `plan_of_line`."""
    from megatron_ext.launch_check.line_plan import plan_halves
    from megatron_ext.patches.engine import PatchError

    try:
        pictures.refuse("--half-pipeline")
        asked = _asked(words, config, log, world_size, gpu, trace, settings)
        with showing_progress():
            made = plan_halves(asked)
    except (ValueError, OSError, PatchError) as error:
        fail(error)
    if as_json:
        typer.echo(json.dumps(made.as_data(), indent=2))
    else:
        typer.echo(made.facts)
        print_halves(made.halves, is_estimate=not made.is_measured)
        for remark in made.remarks:
            typer.echo(f"\n{remark}")
        if made.flags:
            _print_flags(made.flags, made.dropped, f" for {made.halves.half.division}:")
    if not made.halves.fits:
        fail(ValueError(NOTHING_FITS))


def _asked(
    words: Sequence[str],
    config: Path | None,
    log: Path | None,
    world_size: int | None,
    gpu: str | None,
    trace: Path | None,
    settings: Mapping[str, str | bool | None],
) -> Asked:
    """Raises ValueError or OSError where that is not understood."""
    from megatron_ext.launch_check.line_plan import Asked
    from megatron_ext.launch_check.log.megatron_log import launch_from

    if config is not None and (words or log is not None):
        raise ValueError(
            "--config stands in place of a launch line and of --megatron-args: give one of them"
        )
    values = {} if config is None else _values(config)
    world_size = world_size or values.pop(_WORLD_SIZE, None)
    launch = launch_from(words, log) if config is None else None
    if launch is not None:
        gpu = gpu or launch.gpu
    return Asked(
        launch=launch,
        values=values,
        world_size=world_size,
        gpu=None if gpu is None else parse_gpu(gpu),
        settings=tuple(_flags(settings)),
        reserved=None if trace is None else reserved_in(trace),
    )


def _values(path: Path) -> dict[str, Any]:
    text = read_text_file(path, "--config")
    try:
        values = parse_json(text)
    except ValueError as error:
        raise ValueError(f"--config {path} is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"--config {path}: it is to be one object of Megatron's arguments")
    return values


def _flags(settings: Mapping[str, str | bool | None]) -> list[str]:
    words: list[str] = []
    for name, value in settings.items():
        if value:
            words += [flag(name)] if value is True else [flag(name), str(value)]
    return words


def _print(made: LinePlan, *, is_estimate: bool) -> None:
    typer.echo(f"{made.facts}, under {made.own}\n")
    print_plan(made.plan)
    print_unit(is_estimate=is_estimate)
    report = plan_report(made.plan, None)
    print_vocabulary(report.vocabulary)
    if report.recommended is not None:
        print_memory(report.recommended)
        typer.echo(reserve_text(made.reserved, made.is_reserve_modelled))
    for remark in made.remarks:
        typer.echo(f"\n{remark}")
    if made.plan.best is not None:
        typer.echo(f"\n{_comparison(made)}")
        if made.flags:
            _print_flags(made.flags, made.dropped)
    if made.instead is not None:
        typer.echo(f"\n{_without_full_recompute(made.instead, made.plan.best)}")
        _print_flags(made.instead.flags, made.instead.dropped)
    if made.other_pairs is not None:
        typer.echo(f"\n{_other_pairs(made.other_pairs, made.plan.best)}")
        if made.other_pairs.taken is not None:
            _print_flags(made.other_pairs.flags, made.other_pairs.dropped, " for that")
    if made.long_sequences is not None:
        print_long_sequences(made.long_sequences)
    if made.layouts is not None:
        print_layouts(made.layouts, is_estimate=not made.is_measured)


def _print_flags(flags: Sequence[str], dropped: Sequence[str], purpose: str = "") -> None:
    instead = f"\n  in place of {' '.join(dropped)}" if dropped else ""
    typer.echo(f"write{purpose} {shlex.join(flags)}{instead}")


def _comparison(made: LinePlan) -> str:
    """The choice beside the line as it stands."""
    best, line = made.plan.best, made.of_line
    assert best is not None
    if line is None:
        why = f": {made.why_not}" if made.why_not else ", for the reason above"
        return f"the line as it is, under {made.own}, cannot be taken{why}"
    if best is line:
        return f"the line as it is, under {made.own}, is the choice"
    words = f"the line as it is, under {made.own}, takes {slower_by(line, best):.1%} more time"
    if best.fullest is not None and line.fullest is not None:
        words += f", and {bytes_text(line.fullest)} on its fullest rank "
        words += f"(the choice {bytes_text(best.fullest)})"
    if slower_by(line, best) < _EQUAL:
        words += ": an estimate does not tell them apart"
    return words


def _without_full_recompute(instead: Instead, best: Candidate | None) -> str:
    """What there is without full recompute, beside the choice with it, if there is one."""
    taken, made = instead.taken, instead.taken.report
    words = f"without --recompute-granularity full the shortest step is {made.schedule}'s"
    words += f"{made_again(taken)}: {taken.step:.6g}"
    if best is not None:
        words += f" ({slower_by(taken, best):+.1%})"
    return (
        words
        if taken.fullest is None
        else f"{words}, {bytes_text(taken.fullest)} on its fullest rank"
    )


def _other_pairs(other: OtherPairs, best: Candidate | None) -> str:
    """What experts' messages hide, or would."""
    from megatron_ext.adapter.pairs.asked import FLAG

    taken, stock = other.taken, other.stock
    words = f"without {FLAG}" if other.is_asked else f"with {FLAG}, {_IN_PAIRS}"
    if taken is None:
        return f"{words} nothing can be taken: {other.why_none}"
    words += f" the shortest step would be {taken.schedule}'s: {taken.step:.6g}"
    if best is not None:
        words += f", {_than(slower_by(taken, best))} than the choice above"
    if taken.fullest is not None:
        words += f", with {bytes_text(taken.fullest)} on its fullest rank"
    if stock is not None and stock is not taken:
        words += f"; Megatron's own order, {stock.schedule}, would take {stock.step:.6g}"
    return f"{words}. {_HIDDEN}"


def _than(more: float) -> str:
    return f"{more:.1%} more time" if more > 0 else f"{-more:.1%} less time"


_IN_PAIRS = (
    "where a forward and a backward pass run side by side and compute while experts' messages of "
    "the other are on their way,"
)
_HIDDEN = (
    "That half of the time of these messages hides so is assumed: what is published differs "
    "threefold, and no GPU has run our pairs"
)


def _what_gives(made: LinePlan) -> str:
    if not made.gives:
        return "no schedule fits, for the reasons above"
    return "no schedule fits, for the reasons above. With " + "; with ".join(made.gives)
