"""A candidate and a plan as data: flags, seconds and bytes, or the reason of a refusal.

The printed tables, ``--json`` and the pictures name the same values. They are taken from a
candidate here, with the flags that make a launch train under it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from typing import Any

from megatron_ext.base.setting import flag
from megatron_ext.base.words import bytes_text, counted
from megatron_ext.compile.feature_settings import settings_of_options
from megatron_ext.compile.registry import Maturity
from megatron_ext.planner.candidate import Candidate, Plan, RankMemory, VocabMethod
from megatron_ext.schedule.problem import Offload, ScheduleOptions, VocabularyParallel


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one rank by purpose, with the activations at their peak.

    Attributes:
        temporary: bytes of temporary tensors in the largest pass.
        context: bytes of CUDA's context, workspaces and NCCL's buffers.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    temporary: float
    context: float
    total: float


@dataclass(frozen=True)
class Figures:
    """Settings and simulated times and memory of a schedule in a plan, as ``--json`` prints them.

    Attributes:
        vocab_parallel, activation_offload, recompute, slices, memory_limit: settings.
        layers_moved: whether the stages of embedding and output layer have fewer layers.
        recomputed: the share of activations that are recomputed.
        flags: the flags that make a launch train so.
        makespan, step, span: in seconds, or in the unit of the costs.
        fullest_rank: bytes of the rank that holds most; None: not known.
        ranks: bytes of each rank; None if the model is not known.
    """

    schedule: str
    maturity: Maturity
    vocab_parallel: VocabularyParallel
    layers_moved: bool
    activation_offload: Offload
    recompute: str
    recomputed: float
    slices: int
    pairs: int
    memory_limit: str | None
    flags: tuple[str, ...]
    step: float
    makespan: float
    span: float
    bubble_share_makespan: float
    peak_activation_microbatches: float
    fullest_rank: float | None
    ranks: tuple[RankBytes, ...] | None


@dataclass(frozen=True)
class Refusal:
    """Reason why a schedule is not among the candidates of a plan, as ``--json`` prints it."""

    schedule: str
    vocab_parallel: VocabularyParallel
    layers_moved: bool
    why: str


def candidate_figures(candidate: Candidate) -> Figures:
    """Return settings, times and memory of a plan's candidate, as data for ``--json``."""
    made = candidate.report
    return Figures(
        schedule=candidate.schedule,
        maturity=candidate.maturity,
        vocab_parallel=candidate.method.vocabulary,
        layers_moved=candidate.method is VocabMethod.REDISTRIBUTED,
        activation_offload=made.options.activation_offload,
        recompute=str(made.options.recompute),
        recomputed=made.recomputed,
        slices=made.slices,
        pairs=made.pairs,
        memory_limit=None if candidate.limit is None else candidate.limit.written,
        flags=flags_of(candidate),
        step=candidate.step,
        makespan=made.makespan,
        span=made.span,
        bubble_share_makespan=made.bubble_share_makespan,
        peak_activation_microbatches=made.peak,
        fullest_rank=candidate.fullest,
        ranks=None if candidate.memory is None else tuple(map(bytes_of, candidate.memory)),
    )


def bytes_of(rank: RankMemory) -> RankBytes:
    """Return the bytes of a rank by purpose (weights, activations, ...), as data for ``--json``."""
    model = rank.model
    return RankBytes(
        model.weights,
        model.gradients,
        model.optimizer,
        rank.activations,
        model.temporary,
        model.context,
        rank.total,
    )


def as_data(value: Any) -> Any:
    """Return ``value``, made of frozen dataclasses, as plain data for ``--json``.

    A candidate becomes its `Figures`, and a plan its candidates, shortest first, and its refusals.
    A field that the ``repr`` of a dataclass omits is omitted.
    """
    if isinstance(value, Candidate):
        value = candidate_figures(value)
    if isinstance(value, Plan):
        refused = [
            Refusal(name, method.vocabulary, method is VocabMethod.REDISTRIBUTED, why)
            for (name, method), why in value.refusals.items()
        ]
        return {"candidates": as_data(value.candidates), "refused": as_data(refused)}
    if is_dataclass(value):
        shown = (field.name for field in fields(value) if field.repr)
        return {name: as_data(getattr(value, name)) for name in shown}
    if isinstance(value, Mapping):
        return {str(key): as_data(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [as_data(inner) for inner in value]
    return value.value if isinstance(value, Enum) else value


def flags_of(candidate: Candidate) -> tuple[str, ...]:
    """Return the flags with which a launch trains under the plan's ``candidate``."""
    made = candidate.report
    words = ["--pipeline-schedule", made.schedule]
    if candidate.limit is not None:
        words += ["--pipeline-memory-limit", candidate.limit.written]
    options = replace(made.options, steps_overlap=candidate.overlaps)
    defaults = settings_of_options(ScheduleOptions())
    for name, value in settings_of_options(options).items():
        if value != defaults[name]:
            words += [flag(name)] if value is True else [flag(name), str(value)]
    if made.pairs:
        words.append("--overlap-moe-expert-parallel-comm")
    if candidate.method is VocabMethod.REDISTRIBUTED:
        layers = candidate.variant.layers
        assert layers is not None
        words.append("--account-for-loss-in-pipeline-split")
        if (layers + 1) % (made.pp * made.vpp):
            words.append("--account-for-embedding-in-pipeline-split")
    return tuple(words)


def slower_by(candidate: Candidate, best: Candidate) -> float:
    """Return by which share a step of ``candidate`` is longer than a step of ``best``.

    The share is relative to ``best``, and negative if ``candidate`` is faster.
    """
    return candidate.step / best.step - 1


def step_phrase(candidate: Candidate) -> str:
    """Return step time and memory in words: "2.1 s a step without its optimizer, 40.3 GiB".

    Without a model there is no optimizer to name.
    """
    unit = "s" if candidate.variant.in_seconds else "cost units"
    without = "" if candidate.variant.model is None else " without its optimizer"
    return f"{candidate.step:.4g} {unit} a step{without}, {memory_phrase(candidate)}"


def memory_phrase(candidate: Candidate) -> str:
    """Return the memory of the fullest rank in words: bytes, or microbatches if those are
    unknown."""
    if candidate.fullest is None:
        return counted(candidate.report.peak, "microbatch")
    return bytes_text(candidate.fullest)


def recompute_phrase(candidate: Candidate) -> str:
    """Return text such as ``, 20% recomputed in bubbles`` to append; "" if nothing is
    recomputed."""
    share = candidate.report.recomputed
    return f", {share:.0%} recomputed in bubbles" if share else ""
