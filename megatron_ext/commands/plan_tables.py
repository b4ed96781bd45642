"""How a plan is printed."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import typer

from megatron_ext.commands.output import print_table
from megatron_ext.schedule.build.registry import Mark
from megatron_ext.schedule.model.estimate import waiting_shares
from megatron_ext.schedule.model.execution import Execution
from megatron_ext.schedule.model.gpus import FreeMemory
from megatron_ext.schedule.model.model import Model
from megatron_ext.schedule.model.rates import Rates
from megatron_ext.schedule.plan.candidate import Candidate, Plan, VocabMethod
from megatron_ext.schedule.plan.full_recompute import FullRecompute
from megatron_ext.schedule.plan.long_sequences import EQUAL, LongSequences, Row, shortest_slice
from megatron_ext.schedule.plan.plan_report import VocabularyRow
from megatron_ext.schedule.plan.planner import without_figures
from megatron_ext.schedule.plan.recommendation import Recommendation, made_again, slower_by
from megatron_ext.schedule.problem import Offload, Problem
from megatron_ext.schedule.slices import LONG_ENOUGH
from megatron_ext.schedule.words import bytes_text


def print_plan(plan: Plan) -> None:
    """Each schedule with what is best done about the vocabulary; apart, those less tried."""
    best = plan.best_of_each
    recommendable = [candidate for candidate in best if candidate in plan.recommendable]
    others = [candidate for candidate in best if candidate not in plan.recommendable]
    if recommendable:
        _print_candidates(recommendable, plan)
        typer.echo("* no other schedule here takes less time in as little memory")
    if others:
        typer.echo("\nless tried, and so not recommended:")
        _print_candidates(others, plan)
    shown = {candidate.family for candidate in best}
    _print_refusals(
        (name, method, why) for (name, method), why in plan.refusals.items() if name not in shown
    )


def print_unit(*, is_estimate: bool) -> None:
    typer.echo(f"times are in {'seconds, as estimated' if is_estimate else 'the unit of --costs'}")


def print_waits(model: Model, execution: Execution, rates: Rates) -> None:
    for group, shares in waiting_shares(model, execution, rates).items():
        parts = ", ".join(f"{share:.1%} of {kind}" for kind, share in shares.items())
        typer.echo(f"waiting for {group} ranks is {parts}")


def _print_candidates(candidates: Sequence[Candidate], plan: Plan) -> None:
    rows = [_plan_row(candidate, plan) for candidate in candidates]
    kept = [key for key in rows[0] if any(row[key] is not None for row in rows)]
    print_table([{key: "" if row[key] is None else row[key] for key in kept} for row in rows])


def _print_refusals(refusals: Iterable[tuple[str, VocabMethod, str]]) -> None:
    """Print one line for all schedules that are refused for the same reason."""
    names: dict[str, dict[str, list[VocabMethod]]] = {}
    for name, method, why in refusals:
        reason = without_figures(why.removeprefix(f"{name}: "))
        names.setdefault(reason, {}).setdefault(name, []).append(method)
    for why, alike in names.items():
        text = ", ".join(name + _in_brackets(methods) for name, methods in alike.items())
        typer.echo(f"{text}: {why}", err=True)


def _in_brackets(methods: Sequence[VocabMethod]) -> str:
    if VocabMethod.NAIVE in methods:
        return ""
    if {VocabMethod.ONE, VocabMethod.TWO} <= set(methods):
        return " (divided)"
    return f" ({', '.join(_VOCABULARY[method] for method in methods)})"


_VOCABULARY = {
    VocabMethod.NAIVE: "at the ends",
    VocabMethod.REDISTRIBUTED: "layers moved",
    VocabMethod.ONE: "divided: 1",
    VocabMethod.TWO: "divided: 2",
}


def _plan_row(candidate: Candidate, plan: Plan) -> dict[str, Any]:
    assert plan.best is not None
    made, fullest = candidate.report, candidate.fullest
    is_best = candidate is plan.best
    return {
        "schedule": made.schedule,
        "mark": None if candidate.mark is Mark.STABLE else candidate.mark,
        "vocabulary": _VOCABULARY[candidate.method] if len(plan.methods) > 1 else None,
        "offload": None if made.offload is Offload.NONE else made.offload.value,
        "made again": f"{made.made_again:.0%}" if made.made_again else None,
        "F in pairs": f"{made.share_in_pairs:.0%}" if made.pairs else None,
        "step": made.step if made.post_validation else None,
        "makespan": made.makespan,
        "than the choice": "" if is_best else f"{slower_by(candidate, plan.best):+.1%}",
        "bubble": f"{made.bubble_share_makespan:.1%}",
        "span": made.span,
        "peak microbatches": made.peak,
        "fullest rank": None if fullest is None else bytes_text(fullest),
        "": "choice" if is_best else "*" * (candidate in plan.front),
    }


def print_recommended(recommended: Recommendation, free: FreeMemory | None) -> None:
    """Print the memory of the choice, and the flags to write for it.

    Args:
        free: memory that the plan had; None: not known.
    """
    print_memory(recommended)
    if recommended.ranks is not None:
        reserved = None if free is None else free.reserved
        typer.echo(reserve_text(reserved, free is not None and free.is_modelled))
    typer.echo(f"\nwrite {shlex.join(recommended.flags)}")


def reserve_text(reserved: float | None, is_modelled: bool) -> str:
    """Return a line on the memory that the allocator reserves beyond its allocations.

    Args:
        reserved: bytes, for which room is left; None: not known.
        is_modelled: whether they are a model's figure, not a measured one.
    """
    measured_by = (
        "on a GPU --pipeline-trace and --pipeline-costs profile do: --trace DIR, --costs FILE"
    )
    if reserved is None:
        return (
            f"beside that comes what the allocator reserves and does not hand out: not measured "
            f"({measured_by})"
        )
    text = f"beside that the allocator reserves {bytes_text(reserved)}, for which room is left"
    return f"{text}: by a model of it, not measured ({measured_by})" if is_modelled else text


def print_full_recompute(compared: FullRecompute) -> None:
    """What Megatron's full recompute takes, and what there is in its memory instead."""
    taken, instead = compared.taken, compared.instead
    assert taken.fullest is not None
    typer.echo(
        f"\nwith --recompute-granularity full the shortest step is {_told(taken)}, and its fullest "
        f"rank holds {bytes_text(taken.fullest)};"
    )
    if instead is None:
        typer.echo("nothing else fits into that")
        return
    again = made_again(instead)
    how = f"{again} (--pipeline-recompute fit)" if again else ""
    typer.echo(f"in no more than that {_told(instead)} ({slower_by(instead, taken):+.1%}){how}")


def _told(candidate: Candidate) -> str:
    return f"{candidate.schedule}'s, {_VOCABULARY[candidate.method]}: {candidate.step:.6g}"


def print_memory(recommended: Recommendation) -> None:
    if recommended.ranks:
        typer.echo("\nmemory of the choice")
        print_table(
            [
                {"pipeline rank": rank}
                | {name: bytes_text(held) for name, held in vars(row).items()}
                for rank, row in enumerate(recommended.ranks)
            ]
        )


def print_vocabulary(rows: Sequence[VocabularyRow]) -> None:
    if not rows:
        return
    has_moved = any(VocabMethod.REDISTRIBUTED in row.steps for row in rows)
    moved = ", with layers moved away\nfrom there, and" if has_moved else "\nand"
    typer.echo(
        f"\nwhat a step takes with embedding and output layer at the ends of the pipeline{moved} "
        f"with both divided over all ranks (--pipeline-vocab-parallel 1 or 2):"
    )
    print_table(
        [
            {"schedule": row.schedule}
            | {
                _VOCABULARY[method]: "-" if step is None else step
                for method, step in row.steps.items()
            }
            for row in rows
        ]
    )
    _print_refusals(
        (row.schedule, method, why) for row in rows for method, why in row.refused.items()
    )


def print_long_sequences(made: LongSequences) -> None:
    """What can be done about long sequences, by step and memory, and what to write for slices."""
    within = "" if made.room is None else f", in {bytes_text(made.room)} of a rank"
    typer.echo(f"\nsequences of {made.tokens:,} tokens, whole and in slices{within}:")
    rows = [_row_of_sequences(row) for row in made.rows]
    if rows:
        kept = [key for key in rows[0] if any(row[key] not in ("", None) for row in rows)]
        print_table([{key: row[key] for key in kept} for row in rows])
    for why, ways in _by_reason(made.refused).items():
        typer.echo(f"{', '.join(ways)}: {why}")
    best = made.best
    if best is None:
        return
    sliced = [row.made.variant.problem for row in made.rows if row.made.report.slices > 1]
    print_short_slices(sliced, made.of_rank)
    typer.echo(f"\n{_gain_of_slices(best, made)}")
    if made.flags:
        instead = f"\n  in place of {' '.join(made.dropped)}" if made.dropped else ""
        typer.echo(f"write {shlex.join(made.flags)}{instead}")


def _row_of_sequences(row: Row) -> dict[str, Any]:
    report, fullest = row.made.report, row.made.fullest
    excess = "" if row.fits else ", too much"
    return {
        "": row.words,
        "schedule": report.schedule,
        "mark": "" if row.made.mark is Mark.STABLE else row.made.mark,
        "made again": f"{report.made_again:.0%}" if report.made_again else "",
        "step": row.made.step,
        "gain": "" if row.gain is None else f"{row.gain:+.1%}",
        "bubble": f"{report.bubble_share_makespan:.1%}",
        "peak microbatches": f"{report.peak:.3g}",
        "fullest rank": "" if fullest is None else bytes_text(fullest) + excess,
    }


def _by_reason(refused: Mapping[str, str]) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for words, why in refused.items():
        reasons.setdefault(why, []).append(words)
    return reasons


def _gain_of_slices(best: Candidate, made: LongSequences) -> str:
    """The best with slices beside the best without."""
    words = f"{best.report.slices} slices under {best.schedule}"
    whole = made.best_whole
    if whole is None:
        return f"{words} fit, and whole sequences do not"
    gain = slower_by(whole, best)
    text = f"{words}: {gain:+.1%} over whole sequences at their best"
    if abs(gain) < EQUAL:
        text += ", which an estimate does not tell apart"
    if best.fullest is not None and whole.fullest is not None:
        before = bytes_text(whole.fullest)
        text += f"; {bytes_text(best.fullest)} on the fullest rank in place of {before}"
    return text


def print_short_slices(problems: Iterable[Problem], tokens: int) -> None:
    """Say so where slices of a sequence of so many ``tokens`` are short: kernels take longer then
    than is counted."""
    shortest = {problem.slices.count: shortest_slice(problem, tokens) for problem in problems}
    short = {count: length for count, length in shortest.items() if length and length < LONG_ENOUGH}
    if short:
        lengths = ", ".join(f"one of {count} has {length:,}" for count, length in short.items())
        typer.echo(
            f"kernels are slower on slices of fewer than {LONG_ENOUGH:,} tokens or so, which is "
            f"not counted: {lengths}"
        )
