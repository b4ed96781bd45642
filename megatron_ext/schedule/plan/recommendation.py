"""A plan's choice as data: what to write, what is predicted, and why the others lose."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.schedule.build.registry import Mark
from megatron_ext.schedule.plan.candidate import Candidate, Plan, RankMemory, VocabMethod
from megatron_ext.schedule.problem import Offload, Recompute, VocabularyParallel
from megatron_ext.schedule.slices import Lengths


@dataclass(frozen=True)
class RankBytes:
    """What one rank holds, in bytes, with the activations at their peak."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    total: float


@dataclass(frozen=True)
class Refusal:
    """Why a schedule is not among the candidates."""

    schedule: str
    vocabulary: VocabMethod
    why: str


@dataclass(frozen=True)
class Recommended:
    """A candidate's settings and figures; ``fullest_rank`` is in bytes, None if not known."""

    schedule: str
    mark: Mark
    vocabulary: VocabMethod
    offload: Offload
    recompute: str
    memory_limit: str | None
    makespan: float
    step: float
    peak_activation_microbatches: float
    fullest_rank: float | None


@dataclass(frozen=True)
class RunnerUp(Recommended):
    """``slower_by``: the share of the best one's time that it takes more; less than 0 where it is
    faster and not stable."""

    slower_by: float


@dataclass(frozen=True)
class Recommendation(Recommended):
    """The best of a plan, then each other, shortest first, with what it takes more.

    Attributes:
        flags: the words that make a launch train so.
        ranks: None where the model is not known.
    """

    flags: tuple[str, ...]
    bubble_share_makespan: float
    ranks: tuple[RankBytes, ...] | None
    runners_up: tuple[RunnerUp, ...]
    refused: tuple[Refusal, ...]


def flags_of(candidate: Candidate, layers: int | None) -> tuple[str, ...]:
    """The words that make a launch train under ``candidate``.

    Args:
        layers: of the model, which are redistributed if that is the method.
    """
    made = candidate.report
    words = ["--pipeline-schedule", made.schedule]
    if candidate.limit is not None:
        words += ["--pipeline-memory-limit", candidate.limit.written]
    if candidate.method.vocabulary is not VocabularyParallel.NONE:
        words += ["--pipeline-vocab-parallel", candidate.method.vocabulary.value]
    if made.offload is not Offload.NONE:
        words += ["--pipeline-activation-offload", made.offload.value]
    if made.recompute != str(Recompute()):
        words += ["--pipeline-recompute", made.recompute]
    if made.slices > 1:
        words += ["--pipeline-slices", str(made.slices)]
    if made.slice_lengths != Lengths.EVEN:
        words += ["--pipeline-slice-lengths", made.slice_lengths]
    if candidate.overlaps:
        words.append("--pipeline-post-validation")
    if made.pairs:
        words.append("--overlap-moe-expert-parallel-comm")
    if candidate.method is VocabMethod.REDISTRIBUTED:
        assert layers is not None
        words.append("--account-for-loss-in-pipeline-split")
        if (layers + 1) % (made.pp * made.vpp):
            words.append("--account-for-embedding-in-pipeline-split")
    return tuple(words)


def recommendation(plan: Plan, layers: int | None) -> Recommendation | None:
    """What to take of ``plan``; None if nothing can run."""
    best = plan.best
    if best is None:
        return None
    return Recommendation(
        **vars(_recommended(best)),
        flags=flags_of(best, layers),
        bubble_share_makespan=best.report.bubble_share_makespan,
        ranks=None if best.memory is None else tuple(map(_bytes_of, best.memory)),
        runners_up=tuple(
            RunnerUp(**vars(_recommended(other)), slower_by=slower_by(other, best))
            for other in plan.candidates
            if other is not best
        ),
        refused=tuple(Refusal(name, method, why) for (name, method), why in plan.refusals.items()),
    )


def slower_by(candidate: Candidate, best: Candidate) -> float:
    """What share of the time of ``best`` it takes more; less than 0 where it takes less."""
    return candidate.step / best.step - 1


def made_again(candidate: Candidate) -> str:
    """Behind other words, how much of its activations is made again; "" where nothing is."""
    share = candidate.report.made_again
    return f", {share:.0%} made again in bubbles" if share else ""


def _recommended(candidate: Candidate) -> Recommended:
    return Recommended(
        schedule=candidate.schedule,
        mark=candidate.mark,
        vocabulary=candidate.method,
        offload=candidate.report.offload,
        recompute=candidate.report.recompute,
        memory_limit=None if candidate.limit is None else candidate.limit.written,
        makespan=candidate.report.makespan,
        step=candidate.step,
        peak_activation_microbatches=candidate.report.peak,
        fullest_rank=candidate.fullest,
    )


def _bytes_of(rank: RankMemory) -> RankBytes:
    model = rank.model
    return RankBytes(model.weights, model.gradients, model.optimizer, rank.activations, rank.total)
