"""A training job without a launch command, compared with Megatron's 1F1B.

It is a `PlannedJob` like a launch command, but has nothing to keep: its baseline is Megatron's 1F1B
with the same sizes, and its flags are those that a launch would need.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from megatron_ext.cost_model.assumptions import not_checked
from megatron_ext.cost_model.estimate import waiting_shares
from megatron_ext.cost_model.gpus import FreeMemory
from megatron_ext.planner.candidate import Candidate, Plan, Variant, VocabMethod
from megatron_ext.planner.confirmation import without_idle_limit
from megatron_ext.planner.figures import flags_of
from megatron_ext.planner.job_plan import Others, PlannedJob
from megatron_ext.planner.layouts.comparison import compare_layouts
from megatron_ext.planner.layouts.estimated import estimated_work
from megatron_ext.planner.layouts.given import given_work
from megatron_ext.planner.layouts.layout import Layout, even_layout, evenly
from megatron_ext.planner.layouts.work import Work
from megatron_ext.planner.long_sequences import long_sequences
from megatron_ext.planner.planner import make_plan
from megatron_ext.planner.planning_time import LAYOUTS, until_end
from megatron_ext.planner.training import Training
from megatron_ext.planner.verdict import NOTHING, Alternative, Written, is_stock
from megatron_ext.schedule.microbatch_costs import BatchSize
from megatron_ext.schedule.placement import line

_BASELINE = "1f1b"  # Megatron's own schedule without virtual stages
_NOTHING_FITS = (
    "no schedule fits, for the reasons above. A rank holds less with a larger tp or pp, with "
    "distributed-optimizer=true and a larger dp, with recompute=true or a smaller micro-batch"
)
_NOTHING_FITS_THE_LIMIT = (
    "no schedule fits into --memory-limit, for the reasons above: raise it to the least that they "
    "name"
)


def training_job_of(
    training: Training,
    free: FreeMemory | None = None,
    remarks: tuple[str, ...] = (),
) -> TrainingJob:
    """Return ``training`` as a job that can be planned.

    Args:
        free: memory that a rank may take; None: not known.
        remarks: assumptions on the job, a sentence each.
    """
    trained, waits = training.trained, {}
    if trained is not None and training.is_estimate:
        run = trained.execution
        unchecked = not_checked(run)
        remarks += () if unchecked is None else (unchecked,)
        if run.tensor_parallel > 1:
            shares = waiting_shares(trained.model, run, trained.rates)
            waits = {str(group): kinds for group, kinds in shares.items()}
    return TrainingJob(
        training=training,
        text=f"Megatron's {_BASELINE}",
        free=free,
        is_estimate=training.is_estimate,
        in_seconds=training.in_seconds,
        batch=_batch(training),
        remarks=remarks,
        nothing_fits=_NOTHING_FITS if trained else _NOTHING_FITS_THE_LIMIT,
        waits=waits,
    )


@dataclass(frozen=True, kw_only=True)
class TrainingJob(PlannedJob):
    """Job to be planned that has no launch command, only the sizes of its model or its costs."""

    training: Training

    def variant(self, spec: str, method: VocabMethod) -> Variant | None:
        return self.training.variant(spec, method)

    def compare(self) -> Plan:
        may_offload = self.training.trained is not None
        return make_plan(self.variant, self.allowed_bytes, may_offload=may_offload)

    def baseline(self, plan: Plan) -> Alternative | None:
        found = next((one for one in plan.candidates if _is_baseline(one)), None)
        return None if found is None else replace(self.alternative(found), write=lambda: NOTHING)

    def alternative(self, made: Candidate) -> Alternative:
        seconds = made.step + self.training.seconds_outside_passes(made)
        return Alternative(made, seconds, partial(_written, self.training, made))

    def others(self, plan: Plan) -> Others:
        slices = long_sequences(self.training, plan, self.allowed_bytes)
        made = [] if slices is None else list(map(self.alternative, slices.tied))
        none: list[Alternative] = []
        made += until_end(partial(_layouts, self.training, self.allowed_bytes), none, LAYOUTS)
        return Others(tuple(made), slices)

    def judged(self, one: Alternative) -> Alternative:
        is_limited = self.training.limit is not None
        return super().judged(one if is_limited else without_idle_limit(one))

    def why_not(self, plan: Plan) -> str:
        return plan.refusals.get((_BASELINE, VocabMethod.NAIVE), "")


def _batch(training: Training) -> BatchSize:
    trained = training.trained
    if trained is None:
        return BatchSize(training.microbatches)
    run = trained.execution
    return BatchSize(
        training.microbatches,
        trained.state.data_parallel,
        run.micro_batch,
        run.sequence if training.is_estimate else None,
        expert_replicas=run.expert_replicas,
    )


def _is_baseline(candidate: Candidate) -> bool:
    is_naive = candidate.method is VocabMethod.NAIVE and is_stock(candidate)
    return candidate.schedule == _BASELINE and is_naive


def _layouts(training: Training, allowed_bytes: float | None) -> list[Alternative]:
    """Return alternatives with other layouts (layers of each stage), for costs or estimates.

    None if stages are alike, as far as is known, or if nothing is known of single layers.
    """
    work = _work_of(training)
    if work is None:
        return []
    rule = partial(even_layout, work.model)
    even = evenly(len(work.model.layers), training.ranks)
    compared = compare_layouts([work], (_BASELINE, even), rule, allowed_bytes)
    return [
        Alternative(
            made.candidate,
            made.seconds,
            partial(_written, training, made.candidate, made.layout),
            made.layout.text(),
        )
        for made in dict.fromkeys(compared.others.values())
        if made is not compared.baseline
        and (allowed_bytes is None or made.fullest <= allowed_bytes)
    ]


def _work_of(training: Training) -> Work | None:
    trained, options = training.trained, training.options
    if options.slices.count > 1 or options.pairs:
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
        steps_overlap=options.steps_overlap,
        speeds=training.rank_speeds,
    )


def _written(training: Training, candidate: Candidate, layout: Layout | None = None) -> Written:
    """Return the launch flags for a plan's ``candidate``, for a job without a launch command."""
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
