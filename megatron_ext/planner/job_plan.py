"""The plan of one training job: its verdict, and everything that was compared for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from megatron_ext.cost_model.assumptions import not_checked
from megatron_ext.cost_model.estimate import waiting_shares
from megatron_ext.cost_model.gpus import FreeMemory
from megatron_ext.planner.candidate import Candidate, Plan, VocabMethod
from megatron_ext.planner.confirmation import confirmed_verdict
from megatron_ext.planner.curves import Curves, curves_of
from megatron_ext.planner.figures import flags_of
from megatron_ext.planner.layouts.estimated import estimated_work
from megatron_ext.planner.layouts.given import given_work
from megatron_ext.planner.layouts.layout import Layout, even_layout, evenly
from megatron_ext.planner.layouts.lines import compare_layouts
from megatron_ext.planner.layouts.work import Work
from megatron_ext.planner.long_sequences import LongSequences, long_sequences
from megatron_ext.planner.planner import make_plan
from megatron_ext.planner.planning_time import until_end
from megatron_ext.planner.training import Training
from megatron_ext.planner.verdict import (
    NOTHING,
    Alternative,
    Verdict,
    Written,
    is_stock,
)
from megatron_ext.schedule.placement import line

_BASELINE = "1f1b"  # Megatron's own where nothing else is asked for


@dataclass(frozen=True)
class JobPlan:
    """A plan for a job.

    Attributes:
        job: the job in words, with the schedule that it has.
        written: for the verdict; nothing where the job stays as it is.
        of_stock: what is written for the best of Megatron's own levers, if one is worth it.
        command: the whole launch command for the verdict; "" where there is none.
        remarks: what was assumed, and what else there is to know.
        fallbacks: where nothing fits, what would make the leanest schedule fit.
        why_not: why the job cannot run as it is, if it cannot.
        free: memory that a rank may take; None: not known.
        is_estimate: whether times are seconds that were estimated.
        others: alternatives beside the schedules of ``plan``: other layouts, recompute, and so on.
        long_sequences: what can be done about sequences; None where they are short.
        waits: the share of each pass that waits for other ranks of a layer, by their group.
        curves: for the picture; None where nobody asked for one.
    """

    plan: Plan
    verdict: Verdict
    job: str
    written: Written = NOTHING
    of_stock: Written = NOTHING
    command: str = ""
    remarks: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()
    why_not: str = ""
    free: FreeMemory | None = None
    is_estimate: bool = True
    others: tuple[Alternative, ...] = ()
    long_sequences: LongSequences | None = None
    waits: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    curves: Curves | None = field(default=None, repr=False)


def plan_training(
    training: Training, free: FreeMemory | None = None, *, with_curves: bool = False
) -> JobPlan:
    """Compare all schedules for ``training`` with Megatron's 1F1B, and with each other."""
    room = None if free is None else free.allocated
    trained = training.trained
    plan = make_plan(training.variant, room, may_offload=trained is not None)
    slices = long_sequences(training, plan, room)
    own = next((c for c in plan.candidates if _is_baseline(c)), None)
    made = [candidate for candidate in plan.candidates if candidate is not own]
    if slices is not None and slices.best is not None:
        made.append(slices.best)
    alternative = partial(_alternative, training)
    baseline = None if own is None else alternative(own)
    none: list[Alternative] = []
    laid_out = until_end(partial(_layouts, training, room), none)
    others = [*map(alternative, made), *laid_out]
    found, plan = confirmed_verdict(plan, baseline, others, room)
    waits: dict[str, dict[str, float]] = {}
    if trained is not None and training.is_estimate and trained.execution.tensor_parallel > 1:
        shares = waiting_shares(trained.model, trained.execution, trained.rates)
        waits = {str(group): kinds for group, kinds in shares.items()}
    return JobPlan(
        plan,
        found,
        f"Megatron's {_BASELINE}",
        written=NOTHING if found.taken is None or found.keeps else found.taken.write(),
        of_stock=NOTHING if found.stock is None else found.stock.write(),
        why_not="" if own else plan.refusals.get((_BASELINE, VocabMethod.NAIVE), ""),
        free=free,
        is_estimate=training.is_estimate,
        others=tuple(laid_out),
        remarks=_unchecked(training),
        long_sequences=slices,
        waits=waits,
        curves=curves_of(plan, training.variant, room) if with_curves else None,
    )


def _unchecked(training: Training) -> tuple[str, ...]:
    """Return a sentence on the parts of an estimate that no measurement has checked, if any."""
    if training.trained is None or not training.is_estimate:
        return ()
    sentence = not_checked(training.trained.execution)
    return () if sentence is None else (sentence,)


def _is_baseline(candidate: Candidate) -> bool:
    is_naive = candidate.method is VocabMethod.NAIVE and is_stock(candidate)
    return candidate.schedule == _BASELINE and is_naive


def _alternative(training: Training, candidate: Candidate) -> Alternative:
    return Alternative(candidate, candidate.step, lambda: _written(training, candidate))


def _layouts(training: Training, room: float | None) -> list[Alternative]:
    """Return the alternatives with other layouts; none if stages are alike, as far as is known, or
    if nothing is known of single layers."""
    work = _work_of(training)
    if work is None:
        return []
    rule = partial(even_layout, work.model)
    own = evenly(len(work.model.layers), training.ranks)
    lines = compare_layouts([work], (_BASELINE, own), rule, room)
    return [
        Alternative(
            made.candidate,
            made.candidate.step,
            partial(_written, training, made.candidate, made.layout),
            made.layout.text(),
        )
        for made in dict.fromkeys(lines.others.values())
        if made is not lines.own and (room is None or made.fullest <= room)
    ]


def _work_of(training: Training) -> Work | None:
    trained, extras = training.trained, training.extras
    if extras.slices.count > 1 or extras.pairs:
        return None
    if training.costs is not None:
        costs = training.costs(line(training.ranks))
        layers = training.layers if trained is None else len(trained.model.layers)
        if layers is None or layers < training.ranks or costs.host is not None:
            return None
        if trained is not None and not (training.speeds or costs.tower):
            return None
        work = given_work(costs, layers, ranks=training.ranks, microbatches=training.microbatches)
    elif trained is not None and (training.speeds or trained.model.tower):
        work = estimated_work(
            trained.model,
            trained.execution,
            trained.state,
            trained.rates,
            ranks=training.ranks,
            microbatches=training.microbatches,
        )
    else:
        return None
    return replace(
        work,
        limit=training.limit,
        post_validation=extras.post_validation,
        speeds=training.rank_speeds,
    )


def _written(training: Training, candidate: Candidate, layout: Layout | None = None) -> Written:
    """Return the flags for ``candidate`` of a job without a launch command."""
    placed: tuple[str, ...] = ()
    if layout is not None and not layout.is_even:
        placed = ("--pipeline-model-parallel-layout", layout.text())
    if not is_stock(candidate):
        speeds = () if training.speeds is None else ("--pipeline-rank-speeds", str(training.speeds))
        return Written((*flags_of(candidate), *speeds, *placed))
    if placed:
        return Written(placed)
    chunks = candidate.report.vpp
    words = tuple(word for word in flags_of(candidate) if word.startswith("--account-for"))
    if chunks > 1:
        words = ("--num-virtual-stages-per-pipeline-rank", str(chunks), *words)
    return Written(words)
