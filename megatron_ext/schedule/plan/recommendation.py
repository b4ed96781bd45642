"""A plan's choice as data: what to write, what is predicted, and why the others lose."""

from __future__ import annotations

from typing import Any

from megatron_ext.schedule.plan.choose import Candidate, Plan, Way
from megatron_ext.schedule.problem import Offload, VocabularyParallel


def flags_of(candidate: Candidate, layers: int | None) -> list[str]:
    """The words that make a launch train under ``candidate``.

    Args:
        layers: of the model, which are redistributed if that is its way.
    """
    words = ["--pipeline-schedule", candidate.schedule]
    if candidate.limit is not None:
        words += ["--pipeline-memory-limit", candidate.limit.written]
    if candidate.way.vocabulary is not VocabularyParallel.NONE:
        words += ["--pipeline-vocab-parallel", candidate.way.vocabulary.value]
    if candidate.offload is not Offload.NONE:
        words += ["--pipeline-activation-offload", candidate.offload.value]
    if candidate.overlaps:
        words.append("--pipeline-post-validation")
    if candidate.way is Way.REDISTRIBUTED:
        assert layers is not None
        words.append("--account-for-loss-in-pipeline-split")
        if (layers + 1) % (candidate.report["pp"] * candidate.report["vpp"]):
            words.append("--account-for-embedding-in-pipeline-split")
    return words


def recommendation(plan: Plan, layers: int | None) -> dict[str, Any] | None:
    """The best of ``plan``, then each other with what it takes more; None if nothing can run.

    Bytes of ``ranks`` and of ``fullest_rank`` are None where the model is not known.
    """
    best = plan.best
    if best is None:
        return None
    return {
        **_summary(best),
        "flags": flags_of(best, layers),
        "bubble_share_makespan": best.report["bubble_share_makespan"],
        "ranks": best.memory
        and [
            {
                "weights": rank.model.weights,
                "gradients": rank.model.gradients,
                "optimizer": rank.model.optimizer,
                "activations": rank.activations,
                "total": rank.total,
            }
            for rank in best.memory
        ],
        "runners_up": [
            {**_summary(other), "slower_by": slower_by(other, best)}
            for other in plan.candidates[1:]
        ],
        "refused": [
            {"schedule": name, "vocabulary": way.value, "why": why}
            for (name, way), why in plan.refusals.items()
        ],
    }


def slower_by(candidate: Candidate, best: Candidate) -> float:
    """What share of the time of ``best`` it takes more."""
    return candidate.step / best.step - 1


def _summary(candidate: Candidate) -> dict[str, Any]:
    return {
        "schedule": candidate.schedule,
        "vocabulary": candidate.way.value,
        "offload": candidate.offload.value,
        "memory_limit": None if candidate.limit is None else candidate.limit.written,
        "makespan": candidate.report["makespan"],
        "step": candidate.step,
        "peak_activation_microbatches": candidate.peak,
        "fullest_rank": candidate.fullest,
    }
