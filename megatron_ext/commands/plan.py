"""``megatron-ext plan``: every schedule for one model, and which to take."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_ext.commands.options import UNIT, Json, Limit, Microbatches, PostValidation, Ranks
from megatron_ext.commands.output import fail, gib, print_table
from megatron_ext.commands.progress import showing_progress
from megatron_ext.schedule.build.registry import Mark
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.limit import parse_limit
from megatron_ext.schedule.model.estimate import waiting_shares
from megatron_ext.schedule.model.execution import Execution, Precision
from megatron_ext.schedule.model.gpus import GPUS, USABLE, assumed_rates, parse_gpu
from megatron_ext.schedule.model.model import Model
from megatron_ext.schedule.model.model_memory import TrainingState
from megatron_ext.schedule.model.rates import Rates
from megatron_ext.schedule.model.short_form import parse_model
from megatron_ext.schedule.plan.model_plan import Training
from megatron_ext.schedule.plan.plan_report import VocabularyRow, plan_report
from megatron_ext.schedule.plan.planner import Candidate, Plan, VocabMethod, make_plan
from megatron_ext.schedule.plan.recommendation import Recommendation, slower_by
from megatron_ext.schedule.plan.vocabulary_plan import variants_of
from megatron_ext.schedule.problem import Offload
from megatron_ext.schedule.show.draw import check_picture, draw_plan


def plan(
    pp: Ranks,
    microbatches: Microbatches,
    costs: Annotated[
        str | None,
        typer.Option(help="As of simulate. With --model they are its times, as measured."),
    ] = None,
    memory_limit: Limit = None,
    as_json: Json = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw time against memory, as .svg or .png.")
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Of the model: compare with Megatron's redistribution, where costs have a head.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="layers=64,hidden=6144,heads=48,sequence=4096,vocabulary=128000 and, where they "
            "differ, micro-batch=1,ffn=,kv-heads=,head-width=,gated=true,tied=true,recompute=true,"
            "precision=fp8: "
            "estimate times and count memory."
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help=f"{', '.join(GPUS)}, or operations=400e12,bytes=40e9,memory=80GiB, as achieved. "
            f"What takes more than {USABLE:.0%} of the memory does not fit."
        ),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    dp: Annotated[int, typer.Option(min=1, help="Data-parallel ranks.")] = 1,
    distributed_optimizer: Annotated[
        bool,
        typer.Option(
            "--distributed-optimizer", help="Its states are shared by the data-parallel ranks."
        ),
    ] = False,
    post_validation: PostValidation = False,
) -> None:
    """Compare every schedule for one model, and say which to take.

    Stable schedules are recommended, and the others shown apart: megatron-ext schedules has the
    marks.
    """
    room = None
    try:
        if plot is not None:
            check_picture(plot)
        limit = None if memory_limit is None else parse_limit(memory_limit, pp, microbatches)
        if model is None:
            if gpu is not None or tp > 1 or dp > 1 or distributed_optimizer:
                raise ValueError(
                    "--gpu, --tp, --dp and --distributed-optimizer say how a model is trained: "
                    "add --model"
                )
            costs_on = partial(parse_costs, costs or UNIT)
            variant = variants_of(pp, microbatches, costs_on, limit, layers, post_validation)
        else:
            if gpu is None and costs is None:
                raise ValueError("--model does not say how fast it runs: add --gpu, or --costs")
            state = TrainingState(
                distributed=distributed_optimizer, data_parallel=dp, expert_data_parallel=dp
            )
            measured = None if costs is None else partial(parse_costs, costs)
            described = parse_model(model)
            layers = described.layers
            execution = described.execution(tp)
            rates, room = _machine(gpu, execution.precision)
            variant = Training(
                described.model,
                execution,
                state,
                pp,
                microbatches,
                rates,
                limit,
                measured,
                post_validation,
            ).variant
        with showing_progress():
            plan_made = make_plan(variant, room, may_offload=model is not None)
        if plot is not None:
            draw_plan(plan_made, plot)
    except (ValueError, OSError) as error:
        fail(error)
    report = plan_report(plan_made, layers)
    if as_json:
        typer.echo(json.dumps(report.as_data(), indent=2))
    else:
        _print_plan(plan_made)
        _print_unit(is_estimate=model is not None and costs is None)
        if model is not None and costs is None and tp > 1:
            _print_waits(described.model, execution, rates)
        _print_vocabulary(report.vocabulary)
        if report.recommended is not None:
            _print_recommended(report.recommended)
    if report.recommended is None:
        fail(ValueError(_NOTHING_FITS if model else _NOTHING_FITS_THE_LIMIT))


def _machine(gpu: str | None, precision: Precision) -> tuple[Rates, float | None]:
    """What a rank reaches, and the bytes that it may take. Raises ValueError."""
    if gpu is None:
        return assumed_rates(precision), None
    machine = parse_gpu(gpu)
    room = None if machine.memory is None else USABLE * machine.memory
    return machine.rates(precision), room


_NOTHING_FITS = (
    "no schedule fits, for the reasons above. A rank holds less with more --tp or --pp, with "
    "--distributed-optimizer and more --dp, with recompute=true or a smaller micro-batch in --model"
)
_NOTHING_FITS_THE_LIMIT = (
    "no schedule fits into --memory-limit, for the reasons above: raise it to the least that they "
    "name"
)


def _print_plan(plan: Plan) -> None:
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
    shown = {candidate.schedule for candidate in best}
    _print_refusals(
        (name, method, why) for (name, method), why in plan.refusals.items() if name not in shown
    )


def _print_unit(*, is_estimate: bool) -> None:
    typer.echo(f"times are in {'seconds, as estimated' if is_estimate else 'the unit of --costs'}")


def _print_waits(model: Model, execution: Execution, rates: Rates) -> None:
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
        reason = why.removeprefix(f"{name}: ")
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
        "step": made.step if made.post_validation else None,
        "makespan": made.makespan,
        "than the choice": "" if is_best else f"{slower_by(candidate, plan.best):+.1%}",
        "bubble": f"{made.bubble_share_makespan:.1%}",
        "span": made.span,
        "peak microbatches": made.peak,
        "fullest rank": None if fullest is None else gib(fullest),
        "": "choice" if is_best else "*" * (candidate in plan.front),
    }


def _print_recommended(recommended: Recommendation) -> None:
    if recommended.ranks:
        typer.echo("\nmemory of the choice")
        print_table(
            [
                {"pipeline rank": rank} | {name: gib(held) for name, held in vars(row).items()}
                for rank, row in enumerate(recommended.ranks)
            ]
        )
    typer.echo(f"\nwrite {' '.join(recommended.flags)}")


def _print_vocabulary(rows: Sequence[VocabularyRow]) -> None:
    if not rows:
        return
    typer.echo(
        "\nwhat a step takes with embedding and output layer at the ends of the pipeline, with "
        "layers moved away\nfrom there, and with both divided over all ranks "
        "(--pipeline-vocab-parallel 1 or 2):"
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
