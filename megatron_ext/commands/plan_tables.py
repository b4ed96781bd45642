"""The tables of a plan: everything that was compared.

A verdict must be open to doubt, so ``--all`` shows what it was chosen from: each schedule, those
that were refused with their reasons, and other layouts and flags.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import inf
from typing import Any

import typer

from megatron_ext.base.words import bytes_text
from megatron_ext.commands.output import print_table
from megatron_ext.compile.registry import Maturity
from megatron_ext.cost_model.gpus import FreeMemory
from megatron_ext.planner.candidate import Candidate, Plan, VocabMethod
from megatron_ext.planner.figures import bytes_of, slower_by
from megatron_ext.planner.job_plan import JobPlan
from megatron_ext.planner.long_sequences import LongSequences
from megatron_ext.planner.planner import without_figures


def print_tables(made: JobPlan) -> None:
    """Print the tables of everything that the plan ``made`` has compared."""
    typer.echo()
    _print_plan(made)
    unit = "seconds, as measured" if made.in_seconds else "the unit of --costs"
    unit = "seconds, as estimated" if made.is_estimate else unit
    typer.echo(f"times are in {unit}")
    for group, shares in made.waits.items():
        parts = ", ".join(f"{share:.1%} of {kind}" for kind, share in shares.items())
        typer.echo(f"waiting for {group} ranks is {parts}")
    _print_vocabulary(made.plan)
    _print_memory(made)
    if made.others:
        _print_others(made)
    if made.long_sequences is not None:
        _print_long_sequences(made.long_sequences)


def _print_plan(made: JobPlan) -> None:
    """Print a table with each schedule under the best distribution of its vocabulary.

    The verdict's schedule has the time and memory that the verdict gives. Schedules that are not
    recommended have a table of their own.
    """
    plan, taken = made.plan, _taken(made)
    recommendable, others = list[Candidate](), list[Candidate]()
    for candidate in plan.best_of_each:
        is_choice = taken is not None and taken.schedule == candidate.schedule
        table = recommendable if candidate in plan.recommendable else others
        table.append(taken if is_choice and taken is not None else candidate)
    if recommendable:
        _print_candidates(recommendable, made)
        typer.echo("* no other schedule here takes less time in as little memory")
    if others:
        typer.echo("\nless tried, and so not recommended:")
        _print_candidates(others, made)
    print_refusals(plan)


def _taken(made: JobPlan) -> Candidate | None:
    """Return the candidate that the plan recommends.

    None if the recommendation is neither a candidate of the plan nor the unchanged job.
    """
    found = made.verdict
    if found.taken is None:
        return None
    is_shown = found.keeps or found.taken.candidate in made.plan.candidates
    return found.taken.candidate if is_shown else None


def _print_candidates(candidates: Sequence[Candidate], made: JobPlan) -> None:
    rows = [_plan_row(candidate, made) for candidate in candidates]
    kept = [key for key in rows[0] if any(row[key] is not None for row in rows)]
    print_table([{key: "" if row[key] is None else row[key] for key in kept} for row in rows])


def print_refusals(plan: Plan) -> None:
    """Print the refused schedules that have no candidate in the plan, one line for each reason."""
    shown = {candidate.family for candidate in plan.candidates}
    _print_refusals(
        (name, method, why)
        for (name, method), why in plan.refusals.items()
        if name.partition(":")[0] not in shown
    )


_LEAST = re.compile(r"least feasible limit (?:for it )?is ([\d.]+) ?([a-zA-Z]+)")
_TOO_FULL = re.compile(r"([\d.]+ [KMGT]?i?B) more than it may$")


def _print_refusals(refusals: Iterable[tuple[str, VocabMethod, str]]) -> None:
    """Print refusals, one line for all schedules with the same reason.

    Reasons that differ only in their numbers are the same.
    """
    names: dict[str, dict[str, list[VocabMethod]]] = {}
    least: dict[str, tuple[float, str]] = {}
    for name, method, why in refusals:
        reason = without_figures(why.removeprefix(f"{name}: "))
        if limit := _LEAST.search(why):
            unit = "microbatches" if limit[2].startswith("microbatch") else limit[2]
            reason = f"do not fit into the memory limit; the least feasible one, in {unit}, is"
            least[reason] = min(least.get(reason, (inf, "")), (float(limit[1]), name))
        elif _TOO_FULL.search(why):
            reason = "a rank would hold more than it may"
        names.setdefault(reason, {}).setdefault(name, []).append(method)
    for why, alike in names.items():
        text = ", ".join(name + _in_brackets(methods) for name, methods in alike.items())
        figure = "{:g} for {}".format(*least[why]) if why in least else ""
        typer.echo(f"{text}: {why} {figure}".rstrip(), err=True)


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


def _plan_row(candidate: Candidate, job: JobPlan) -> dict[str, Any]:
    plan, made, fullest = job.plan, candidate.report, candidate.fullest
    taken = _taken(job)
    reference = taken or plan.best
    assert reference is not None
    is_best = candidate is reference
    return {
        "schedule": made.schedule,
        "maturity": None if candidate.maturity is Maturity.STABLE else candidate.maturity,
        "vocabulary": _VOCABULARY[candidate.method] if len(plan.methods) > 1 else None,
        "offload": made.options.activation_offload if made.offloads else None,
        "recomputed": f"{made.recomputed:.0%}" if made.recomputed else None,
        "overlapped F": f"{made.share_in_pairs:.0%}" if made.pairs else None,
        "step": made.step if made.options.steps_overlap else None,
        "makespan": made.makespan,
        "step compared with the choice": ""
        if is_best
        else f"{slower_by(candidate, reference):+.1%}",
        "bubble": f"{made.bubble_share_makespan:.1%}",
        "span": made.span,
        "peak microbatches": made.peak,
        "fullest rank": None if fullest is None else bytes_text(fullest),
        # plain words: the row that the plan has chosen
        "": "choice" if candidate is taken else "*" * (candidate in plan.front),
    }


def _print_others(made: JobPlan) -> None:
    """Print a table of other layouts of layers and other flags of Megatron, with their gains."""
    typer.echo("\nwith other flags of Megatron's, and other layers on its stages:")
    print_table(
        [
            {
                "": one.name,
                "layers": one.layout,
                "step": one.seconds,
                "saves": f"{made.verdict.saving_of(one):.1%}",
                "fullest rank": "" if one.candidate.fullest is None else bytes_text(one.holds),
            }
            for one in sorted(made.others, key=lambda one: one.seconds)
        ]
    )
    typer.echo("a step is here with its optimizer, and with reductions that no pass hides")


def _print_memory(made: JobPlan) -> None:
    taken = made.verdict.taken
    if taken is None or taken.candidate.memory is None:
        return
    typer.echo(f"\nmemory under {taken.name}")
    rows = enumerate(map(bytes_of, taken.candidate.memory))
    print_table(
        [
            {"pipeline rank": rank} | {name: bytes_text(held) for name, held in vars(row).items()}
            for rank, row in rows
        ]
    )
    typer.echo(_reserve_text(made.free))


def _reserve_text(free: FreeMemory | None) -> str:
    """Return a line on memory that torch's allocator reserves beyond its allocations."""
    measured_by = (
        "on a GPU megatron-ext rehearse, --pipeline-costs profile and --pipeline-trace do: "
        "--costs FILE, --trace DIR"
    )
    if free is None:
        return (
            f"in addition the allocator reserves memory that it does not hand out: not measured "
            f"({measured_by})"
        )
    reserved = bytes_text(free.reserved)
    text = f"in addition the allocator reserves {reserved}, which the plan leaves free"
    assumed = f"{text}: assumed, not measured ({measured_by})"
    return assumed if free.is_modelled else text


def _print_vocabulary(plan: Plan) -> None:
    """Print a table of step times by schedule and by the distribution of the vocabulary."""
    methods = plan.methods
    names = [c.schedule for c in plan.candidates if c.method is VocabMethod.NAIVE]
    if len(methods) == 1 or not names:
        return
    steps = {(c.schedule, c.method): c.step for c in plan.candidates}
    typer.echo("\na step by where embedding and output layer are (--pipeline-vocab-parallel):")
    print_table(
        [
            {"schedule": name}
            | {_VOCABULARY[method]: steps.get((name, method), "-") for method in methods}
            for name in names
        ]
    )


def _print_long_sequences(made: LongSequences) -> None:
    """Print a table with the shortest step under each treatment of long sequences."""
    typer.echo(f"\nsequences of {made.tokens:,} tokens, whole and in slices:")
    shortest = {alternative.words: alternative.shortest for alternative in made.alternatives}
    known = {words: one for words, one in shortest.items() if one is not None}
    if known:
        print_table([{"": words} | _row_of_sequences(one) for words, one in known.items()])
    for alternative in made.alternatives:
        if alternative.shortest is None:
            typer.echo(f"{alternative.words}: {alternative.why_not}")


def _row_of_sequences(one: Candidate) -> dict[str, Any]:
    return {
        "schedule": one.schedule,
        "recomputed": f"{one.report.recomputed:.0%}" if one.report.recomputed else "",
        "step": one.step,
        "bubble": f"{one.report.bubble_share_makespan:.1%}",
        "peak microbatches": f"{one.report.peak:.3g}",
        "fullest rank": "" if one.fullest is None else bytes_text(one.fullest),
    }
