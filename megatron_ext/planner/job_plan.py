"""The planner: from a described training job to its plan.

Each source of a job (sizes of a model or its costs, a launch command, a launch that is about to
start) is a `PlannedJob`. One driver serves all of them:

    PlannedJob -> candidates -> alternatives with their seconds -> verdict -> JobPlan
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron_ext.cost_model.gpus import FreeMemory
from megatron_ext.planner.candidate import Candidate, Plan, Variant, VocabMethod
from megatron_ext.planner.confirmation import confirmed_verdict, with_whole_step
from megatron_ext.planner.curves import Curves, curves_of
from megatron_ext.planner.long_sequences import LongSequences
from megatron_ext.planner.planning_time import has_ended_early, unfinished_alternatives
from megatron_ext.planner.spread import GainSpread
from megatron_ext.planner.unequal_gains import UnequalGains, unequal_gains
from megatron_ext.planner.verdict import NOTHING, Alternative, Verdict, Written, spread_of
from megatron_ext.schedule.microbatch_costs import BatchSize, read_loads


@dataclass(frozen=True)
class Others:
    """Alternatives to a job that are not schedules of its plan: other layouts, recompute and so on.

    Attributes:
        alternatives: the alternatives.
        long_sequences: alternatives for long sequences; None if they are short.
        remarks: sentences on the comparison.
    """

    alternatives: tuple[Alternative, ...] = ()
    long_sequences: LongSequences | None = None
    remarks: tuple[str, ...] = ()


_NO_OTHERS = Others()


@dataclass(frozen=True, kw_only=True)
class PlannedJob(ABC):
    """Training job to be planned: its description, its GPUs and its memory limits.

    Attributes:
        text: the job in words, with the schedule that it has.
        free: memory that a rank may take; None: not known.
        has_pipeline: whether there is more than one pipeline rank, so that schedules differ.
        is_estimate: whether times are seconds that were estimated.
        in_seconds: whether times are seconds, estimated or measured.
        batch: size of the batch of a step; None: not known.
        remarks: assumptions on the job, a sentence each.
        nothing_fits: error message if nothing fits.
        confirms_all: whether every schedule that may prove to be the shortest is built with all
            microbatches, and not only what is recommended.
        waits: by group of ranks that share a layer and by kind of pass, the share of the pass that
            waits for messages within the group.
    """

    text: str = ""
    free: FreeMemory | None = None
    has_pipeline: bool = True
    is_estimate: bool = True
    in_seconds: bool = True
    batch: BatchSize | None = None
    remarks: tuple[str, ...] = ()
    nothing_fits: str = "no schedule fits, for the reasons above"
    confirms_all: bool = True
    waits: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def allowed_bytes(self) -> float | None:
        """Bytes that the tensors of a rank may take in this job; None if not known."""
        return None if self.free is None else self.free.allocated

    @abstractmethod
    def variant(self, spec: str, method: VocabMethod) -> Variant | None:
        """Return the problem of the schedule ``spec`` for this job, for `make_plan`.

        None if the vocabulary method does not apply.
        """

    @abstractmethod
    def compare(self) -> Plan:
        """Compare schedules for this job and return their plan."""

    @abstractmethod
    def baseline(self, plan: Plan) -> Alternative | None:
        """Return the unchanged job as an alternative, though it may not fit into memory.

        None if nothing is known of it. ``plan`` is the result of `compare`.
        """

    @abstractmethod
    def alternative(self, made: Candidate) -> Alternative:
        """Return a schedule of the plan as an alternative for this job, with its seconds and
        flags."""

    def others(self, plan: Plan) -> Others:
        """Compare alternatives to this job that are not schedules of ``plan``, such as layouts."""
        return _NO_OTHERS

    def judged(self, one: Alternative) -> Alternative:
        """Return an alternative with exact time and memory for this job.

        Raises:
            ValueError: a training with this alternative could not start.
        """
        return one if one.write() == NOTHING else with_whole_step(one, self.allowed_bytes)

    def refusal_of(self, written: Written) -> str | None:
        """Return why a training with the flags ``written`` could not start; None if it could."""
        return None

    def why_not(self, plan: Plan) -> str:
        """Return the reason why the unchanged job cannot run; "" if that is not known."""
        return ""

    def fallbacks(self, others: Others) -> tuple[str, ...]:
        """Return a text for each change of settings that would make the job fit into memory."""
        return ()

    def command(self, written: Written) -> str:
        """Return the whole launch command with the flags ``written``; "" if the job has no
        command."""
        return ""

    def on_assumed(self, found: Verdict) -> str:
        """Return the assumptions about this job on which the recommendation depends; "" if none."""
        return ""

    def remarks_on(self, taken: Candidate, written: Written) -> tuple[str, ...]:
        """Return remarks on this job when it runs the recommended schedule with these flags."""
        return ()


@dataclass(frozen=True)
class JobPlan:
    """Plan of a training job: the schedules compared, and the recommendation.

    Attributes:
        plan: the schedules compared.
        verdict: the recommendation.
        job: the job in words, with the schedule that it has.
        written: the flags for the recommendation; nothing if the job does not change.
        of_stock: the flags for the best change that Megatron has itself, if one is worth it.
        command: the whole launch command for the recommendation; "" if there is none.
        remarks: assumptions, and what else there is to know.
        fallbacks: what would make the schedule with the least memory fit, if nothing fits.
        why_not: reason why the unchanged job cannot run, if it cannot.
        free: memory that a rank may take; None: not known.
        is_estimate: whether times are seconds that were estimated.
        in_seconds: whether times are seconds, estimated or measured.
        others: alternatives in addition to the schedules of ``plan``: other layouts, recompute, and
            so on.
        long_sequences: alternatives for long sequences; None if they are short.
        waits: by group of ranks that share a layer and by kind of pass, the share of the pass that
            waits for messages within the group.
        unequal: gains of arranged microbatches; None if no lengths were given, or nothing fits.
        curves: for the picture; None if none was requested.
        nothing_fits: error message if nothing fits.
        has_pipeline: whether there is more than one pipeline rank, so that schedules differ.
        is_short: whether not all alternatives were compared, since the time of the plan was over.
        unfinished: kinds of alternatives that were not compared to their end because of that.
        assumed: assumptions about the job that the recommendation depends on; "" if there are none.
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
    in_seconds: bool = True
    others: tuple[Alternative, ...] = ()
    long_sequences: LongSequences | None = None
    waits: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    unequal: UnequalGains | None = None
    curves: Curves | None = field(default=None, repr=False)
    nothing_fits: str = field(default="", repr=False)
    has_pipeline: bool = field(default=True, repr=False)
    is_short: bool = False
    unfinished: tuple[str, ...] = ()
    assumed: str = ""

    @property
    def spread(self) -> GainSpread | None:
        """How far the predicted gain may be off; None without a gain, or if it was not
        estimated."""
        return spread_of(self.verdict) if self.is_estimate else None


def plan_job(job: PlannedJob, *, with_curves: bool = False, lengths: Path | None = None) -> JobPlan:
    """Compare all schedules and settings that ``job`` could train with; return the plan.

    Args:
        with_curves: whether to compute the data of the plan's picture.
        lengths: file of microbatches (`read_loads`), to compute the gain of arranging them under
            the recommended schedule; None: all microbatches are equal.

    Raises:
        ValueError: ``lengths`` is at fault.
    """
    loads = None
    if lengths is not None:
        assert job.batch is not None
        loads = read_loads(lengths, job.batch)
    plan = job.compare()
    baseline = job.baseline(plan)
    baseline_candidate = None if baseline is None else baseline.candidate
    others = job.others(plan)
    pool = [job.alternative(made) for made in plan.candidates if made is not baseline_candidate]
    pool += others.alternatives
    found, plan = confirmed_verdict(
        plan, baseline, pool, job.judged, job.allowed_bytes, confirms_all=job.confirms_all
    )
    taken, stock = found.taken, found.stock
    written = NOTHING if taken is None else taken.write()
    unequal = None
    # The comparison of orders for unequal microbatches takes only seconds, so it runs even if the
    # planning time is over.
    if taken is not None and loads is not None:
        assert job.batch is not None
        unequal = unequal_gains(loads, job.batch, taken, written, job.refusal_of)
    is_changed = taken is not None and not found.keeps
    remarks = (*job.remarks, *others.remarks)
    if taken is not None:
        remarks += job.remarks_on(taken.candidate, written)
    command = replace(written, arranging=() if unequal is None else unequal.flags)
    return JobPlan(
        plan,
        found,
        job.text,
        written=written,
        of_stock=NOTHING if stock is None else stock.write(),
        command=job.command(command) if is_changed or command.arranging else "",
        remarks=remarks,
        fallbacks=job.fallbacks(others) if taken is None else (),
        nothing_fits=job.nothing_fits,
        has_pipeline=job.has_pipeline,
        why_not=job.why_not(plan) if baseline is None else "",
        free=job.free,
        is_estimate=job.is_estimate,
        in_seconds=job.in_seconds,
        others=others.alternatives,
        long_sequences=others.long_sequences,
        waits=job.waits,
        unequal=unequal,
        is_short=has_ended_early(),
        unfinished=unfinished_alternatives(),
        assumed=job.on_assumed(found),
        curves=curves_of(plan, job.variant, job.allowed_bytes) if with_curves else None,
    )
