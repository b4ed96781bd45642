"""Alternatives for long sequences: slices, compared with other ways to save memory or bubbles.

Long sequences fill the memory and leave few microbatches, so ranks wait long. Slices cut both, but
so do recompute and context parallelism, and each has its price. All are planned like the job
itself, so that one sees which is worth it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from megatron_ext.base.words import counted
from megatron_ext.compile.registry import entry_of
from megatron_ext.compile.size import seconds_to_build
from megatron_ext.cost_model.execution import Execution
from megatron_ext.planner.candidate import (
    Candidate,
    Plan,
    Variant,
    VocabMethod,
    stable_of,
    tied,
)
from megatron_ext.planner.figures import flags_of
from megatron_ext.planner.limits import least_step
from megatron_ext.planner.planner import VariantOf, make_plan
from megatron_ext.planner.training import TrainedModel, Training
from megatron_ext.planner.verdict import NOTHING, Written
from megatron_ext.schedule.problem import Offload
from megatron_ext.schedule.slices import UNCUT, Lengths, Slices

LONG = 8192  # length of a sequence in tokens from which context parallelism is also compared
COUNTS = (2, 4, 8)
# Schedules that are compared with slices of sequences. SlimPipe's order is not among them, since it
# equals interleaved's if the number of slices is a multiple of the ranks.
SPECS = (
    *("1f1b", "interleaved", "interleaved-zb", "zb-h1", "zb-auto"),
    *("zb-v", "v-half", "v-min"),
)
WHOLE_SEQUENCES, FULL_RECOMPUTE = "whole sequences", "--recompute-granularity full"
# Least gain for which slices are recommended, and for which their joined W are compared, as a share
# of a step. No GPU has measured what slices cost.
WORTH_SLICES = 0.03
# Schedules for one chunk per rank, and for two chunks with the first and the last stage on one
# rank.
_PLACED = ("zb-h1", "zb-v")
# Longest time in seconds to build a program that is compared here. Schedules that take longer are
# only named.
_SECONDS = 0.3
_IF_RECOMPUTED = "it fits if some activations are recomputed"


@dataclass(frozen=True, eq=False)
class LongSequenceAlternative:
    """Alternative for a job with long sequences: slices, context parallelism or full recompute.

    Attributes:
        words: a name of the alternative.
        candidates: the schedules that fit, shortest step first.
        why_not: reason why none fits.
        slices: slices of a sequence.
        is_here: whether the ranks are split as in the launch; if not, it only serves comparison.
    """

    words: str
    candidates: tuple[Candidate, ...]
    why_not: str = ""
    slices: int = 1
    is_here: bool = True

    @property
    def shortest(self) -> Candidate | None:
        """The schedule with the shortest step of this alternative, a stable schedule if there is
        one."""
        return next(iter(stable_of(self.candidates) or self.candidates), None)


@dataclass(frozen=True)
class LongSequences:
    """Comparison of alternatives for long sequences: slices, context parallelism, full recompute.

    Attributes:
        tokens: tokens of a sequence.
        alternatives: the alternatives.
        written: the flags for `best`, if there is one.
    """

    tokens: int
    alternatives: tuple[LongSequenceAlternative, ...]
    written: Written = NOTHING

    @property
    def tied(self) -> tuple[Candidate, ...]:
        """The schedules with slices that tie for the shortest step, the recommended one first.

        () if whole sequences are hardly slower.
        """
        made = [made for one in self.alternatives if one.slices > 1 for made in one.candidates]
        uncut = [one.shortest for one in self.alternatives if one.slices == 1 and one.is_here]
        sliced = tied(stable_of(made) or made)
        least = min((one.step for one in uncut if one is not None), default=math.inf)
        return sliced if sliced and least >= (1 + WORTH_SLICES) * sliced[0].step else ()

    @property
    def best(self) -> Candidate | None:
        """The recommended schedule with slices; None if slices gain too little."""
        return next(iter(self.tied), None)


def context_parallel(ranks: int, copies: int) -> str:
    """Return the name of an alternative with these numbers of context-parallel ranks and
    replicas."""
    return f"--context-parallel-size {ranks}, DP {copies}"


def long_sequences(
    training: Training, plan: Plan, allowed_bytes: float | None
) -> LongSequences | None:
    """Return the alternatives for the long sequences of a training; None if slices gain nothing.

    Args:
        plan: the training's plan without changes.
        allowed_bytes: bytes that a rank may take; None: as much as it takes.
    """
    trained, requested = training.trained, training.options.slices
    if trained is None:
        return None
    cuts = cuts_that_may_gain(partial(_with_slices, training), plan, requested)
    if not cuts and requested.count == 1:
        return None
    alternatives = alternatives_of_plan(plan, requested)
    if requested.count > 1:
        alternatives.append(
            long_sequence_alternative(WHOLE_SEQUENCES, _with_slices(training, UNCUT), allowed_bytes)
        )
    elif training.is_estimate and trained.execution.sequence >= LONG:
        alternatives += _of_other_settings(training, trained, allowed_bytes)
    alternatives += alternatives_with_slices(partial(_with_slices, training), allowed_bytes, cuts)
    made = LongSequences(trained.execution.sequence, tuple(alternatives))
    return made if made.best is None else replace(made, written=Written(flags_of(made.best)))


def _with_slices(training: Training, slices: Slices) -> VariantOf:
    return replace(training, options=replace(training.options, slices=slices)).variant


def _of_other_settings(
    training: Training, trained: TrainedModel, allowed_bytes: float | None
) -> Iterator[LongSequenceAlternative]:
    """Yield the alternatives with full recompute, and with twice the context parallelism.

    The latter has half of the data parallelism.
    """
    execution, copies = trained.execution, trained.state.data_parallel

    def run(execution: Execution, microbatches: int) -> VariantOf:
        changed = replace(trained, execution=execution)
        return replace(training, trained=changed, microbatches=microbatches).variant

    if not execution.recompute:
        fully_recomputed = run(replace(execution, recompute=True), training.microbatches)
        yield long_sequence_alternative(FULL_RECOMPUTE, fully_recomputed, allowed_bytes)
    if copies % 2 == 0:
        ranks = 2 * execution.context_parallel
        divided = run(replace(execution, context_parallel=ranks), 2 * training.microbatches)
        yield long_sequence_alternative(
            context_parallel(ranks, copies // 2), divided, allowed_bytes, is_here=False
        )


def cuts_that_may_gain(
    variants_of: Callable[[Slices], VariantOf], plan: Plan, requested: Slices = UNCUT
) -> list[Slices]:
    """Return those of `cuts_to_compare` that could shorten the best step of ``plan``.

    Slices could shorten it by more than `WORTH_SLICES` if two conditions hold: ranks are idle for
    more than that share of the step, or activations are recomputed; and a lower bound of the step
    with slices is that much shorter. All are returned if nothing in ``plan`` fits.
    """
    best = plan.best
    if best is None:
        return cuts_to_compare(variants_of, requested)
    if best.report.bubble_share_makespan < WORTH_SLICES and not best.report.recomputed:
        return []
    return cuts_to_compare(variants_of, requested, at_most=(1 - WORTH_SLICES) * best.step)


def cuts_to_compare(
    variants_of: Callable[[Slices], VariantOf],
    requested: Slices = UNCUT,
    at_most: float = math.inf,
) -> list[Slices]:
    """Return the slices to compare: each of `COUNTS`, of equal work, with a W for each slice, and
    with joined W if that `may_gain_by_joining`.

    Args:
        variants_of: as in `alternatives_with_slices`. Slices for which it raises ValueError are
            returned, so that the reason is shown.
        requested: the slices of the plan, which are not compared once more.
        at_most: seconds of a step within which the slices' lower bound has to be.
    """
    cuts: list[Slices] = []
    for count in COUNTS:
        is_requested = count == requested.count
        slices = Slices(count, requested.lengths if is_requested else Lengths.BALANCED)
        try:
            variant_of = variants_of(slices)
            made = [variant_of(spec, VocabMethod.NAIVE) for spec in _PLACED]
        except ValueError:
            cuts.append(slices)
            continue
        variants = [variant for variant in made if variant is not None]
        if any(least_step(variant) <= at_most for variant in variants):
            cuts.append(slices)
        joined = filter(may_gain_by_joining, variants)
        if any(least_step(with_joined_weights(variant)) <= at_most for variant in joined):
            cuts.append(replace(slices, joined_weights=True))
    return [cut for cut in cuts if cut != requested]


def may_gain_by_joining(variant: Variant) -> bool:
    """Return whether joined W may shorten a step of ``variant``, with slices, by `WORTH_SLICES`.

    If W are not joined, the W of each slice takes the fixed part of W's time once more.
    """
    options = variant.problem.options
    conflicts = options.activation_offload is not Offload.NONE or options.recompute.fit
    if conflicts or not variant.resolved.traits.splits_backward:
        return False
    return least_step(with_joined_weights(variant)) <= (1 - WORTH_SLICES) * least_step(variant)


def with_joined_weights(variant: Variant) -> Variant:
    """Return ``variant``, which has slices, with one pass for the W of a microbatch's slices."""
    joined = replace(variant.problem.slices, joined_weights=True)
    return replace(variant, problem=variant.problem.with_options(slices=joined))


def name_of_cut(slices: Slices) -> str:
    """Return the name of an alternative with ``slices``."""
    return f"{slices.count} slices" + (", their W joined" if slices.joined_weights else "")


def alternatives_of_plan(plan: Plan, slices: Slices = UNCUT) -> list[LongSequenceAlternative]:
    """Return the schedules of ``plan`` as alternatives: without, and with recompute in bubbles.

    The latter is missing if no schedule recomputes (--pipeline-recompute).

    Args:
        slices: slices into which each sequence is cut in this plan.
    """
    words, count = WHOLE_SEQUENCES if slices.count == 1 else name_of_cut(slices), slices.count
    without_recompute = tuple(made for made in plan.candidates if not made.report.recomputed)
    alternatives = [
        LongSequenceAlternative(
            words,
            without_recompute,
            "" if without_recompute else _why_nothing(plan) or _IF_RECOMPUTED,
            count,
        )
    ]
    with_recompute = tuple(made for made in plan.candidates if made.report.recomputed)
    return (
        [
            *alternatives,
            LongSequenceAlternative(
                f"{words}, --pipeline-recompute fit", with_recompute, "", count
            ),
        ]
        if with_recompute
        else alternatives
    )


def alternatives_with_slices(
    variants_of: Callable[[Slices], VariantOf],
    allowed_bytes: float | None,
    cuts: Sequence[Slices],
    specs: Sequence[str] = SPECS,
) -> list[LongSequenceAlternative]:
    """Return alternatives with sequences cut into slices, one for each of ``cuts``.

    Args:
        variants_of: function that returns the problem of each schedule with such slices. It raises
            ValueError if there is none.
        allowed_bytes: bytes that a rank may take; None: as much as it takes.
    """
    alternatives = []
    for slices in cuts:
        words, count = name_of_cut(slices), slices.count
        try:
            variant_of = variants_of(slices)
        except ValueError as error:
            alternatives.append(LongSequenceAlternative(words, (), str(error), count))
            continue
        have_w = [spec for spec in specs if entry_of(spec).traits.splits_backward]
        of_cut = have_w if slices.joined_weights else specs
        alternatives.append(
            long_sequence_alternative(words, variant_of, allowed_bytes, count, of_cut)
        )
    return alternatives


def long_sequence_alternative(
    words: str,
    variant_of: VariantOf,
    allowed_bytes: float | None,
    slices: int = 1,
    specs: Sequence[str] = SPECS,
    *,
    is_here: bool = True,
) -> LongSequenceAlternative:
    """Return an alternative for long sequences: those schedules that fit into ``allowed_bytes``.

    The vocabulary is at the ends of the pipeline, and nothing is searched. Schedules whose
    simulation takes long are refused.
    """

    def quick(name: str, method: VocabMethod) -> Variant | None:
        variant = variant_of(name, method) if method is VocabMethod.NAIVE else None
        if variant is not None and seconds_to_build(variant.problem) > _SECONDS:
            raise ValueError(
                f"simulating {counted(variant.problem.pieces, 'slice')} in a step takes too long: "
                f"write --pipeline-slices {slices} in the planned command"
            )
        return variant and replace(variant, resolved=variant.resolved.without_search)

    plan = make_plan(quick, allowed_bytes, specs=specs)
    return LongSequenceAlternative(words, plan.candidates, _why_nothing(plan), slices, is_here)


def _why_nothing(plan: Plan) -> str:
    """Return the most frequent reason why schedules are refused; "" if some are not refused."""
    if plan.candidates or not plan.refusals:
        return ""
    reasons = [why.removeprefix(f"{name}: ") for (name, _), why in plan.refusals.items()]
    return max(reasons, key=reasons.count)
