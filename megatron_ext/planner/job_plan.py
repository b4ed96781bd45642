"""The plan of one training job: its verdict, and everything that was compared for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_ext.cost_model.assumptions import not_checked
from megatron_ext.cost_model.estimate import waiting_shares
from megatron_ext.cost_model.gpus import FreeMemory
from megatron_ext.planner.candidate import Candidate, Plan, VocabMethod
from megatron_ext.planner.confirmation import confirmed_verdict
from megatron_ext.planner.curves import Curves, curves_of
from megatron_ext.planner.figures import flags_of
from megatron_ext.planner.long_sequences import LongSequences, long_sequences
from megatron_ext.planner.planner import make_plan
from megatron_ext.planner.training import Training
from megatron_ext.planner.verdict import (
    NOTHING,
    Alternative,
    Verdict,
    Written,
    is_stock,
)

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
    baseline = None if own is None else _alternative(own)
    found, plan = confirmed_verdict(plan, baseline, [*map(_alternative, made)], room)
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


def _alternative(candidate: Candidate) -> Alternative:
    return Alternative(candidate, candidate.step, lambda: _written(candidate))


def _written(candidate: Candidate) -> Written:
    """Return the flags for ``candidate`` of a job without a launch command."""
    if not is_stock(candidate):
        return Written(flags_of(candidate))
    chunks = candidate.report.vpp
    words = tuple(word for word in flags_of(candidate) if word.startswith("--account-for"))
    if chunks > 1:
        words = ("--num-virtual-stages-per-pipeline-rank", str(chunks), *words)
    return Written(words)
