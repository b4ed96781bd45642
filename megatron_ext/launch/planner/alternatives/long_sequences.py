"""Alternatives for a launch with long sequences: slices, recompute, V's and context parallelism.

A pipeline with few microbatches waits long, and one with long sequences lacks memory. Slices help
with both, and so do settings of Megatron's own, so they are compared side by side.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_ext.base.words import bytes_text
from megatron_ext.compile.registry import entry_of
from megatron_ext.launch.planner.alternatives.without_full_recompute import (
    WITH_FULL_RECOMPUTE,
)
from megatron_ext.launch.planner.variants import LaunchVariants
from megatron_ext.planner.candidate import Candidate, Plan
from megatron_ext.planner.figures import slower_by
from megatron_ext.planner.long_sequences import (
    FULL_RECOMPUTE,
    LONG,
    WHOLE_SEQUENCES,
    WORTH_SLICES,
    LongSequenceAlternative,
    LongSequences,
    alternatives_of_plan,
    alternatives_with_slices,
    context_parallel,
    cuts_that_may_gain,
    cuts_to_compare,
    long_sequence_alternative,
)
from megatron_ext.planner.verdict import Written
from megatron_ext.schedule.slices import UNCUT

if TYPE_CHECKING:
    from megatron_ext.launch.planner.parsed_launch import ParsedLaunch

_SIMPLE = ("zb-h1", "zb-v")


def long_sequences_of_launch(parsed: ParsedLaunch, plan: Plan) -> LongSequences | None:
    """Return alternatives for the long sequences of the launch; None if slices can gain nothing.

    ``plan`` is the plan without them.
    """
    args, variants, allowed_bytes = parsed.validated, parsed.variants, parsed.allowed_bytes
    requested = variants.config.options.slices
    cuts = cuts_that_may_gain(lambda cut: variants.with_slices(cut).variant, plan, requested)
    if not cuts and requested.count == 1:
        return None
    alternatives = alternatives_of_plan(plan, requested)
    if requested.count > 1:
        alternatives.append(
            long_sequence_alternative(
                WHOLE_SEQUENCES, variants.with_slices(UNCUT).variant, allowed_bytes
            )
        )
    elif args.seq_length >= LONG and parsed.measured is None and variants.config.costs.is_estimate:
        alternatives += _of_other_settings(parsed)
    alternatives += alternatives_with_slices(
        lambda cut: variants.with_slices(cut).variant, allowed_bytes, cuts
    )
    made = LongSequences(args.seq_length, tuple(alternatives))
    best = made.best
    if best is None:
        return made
    return replace(made, written=written_with_slices(parsed, best))


def written_with_slices(parsed: ParsedLaunch, made: Candidate) -> Written:
    """Return the flags that make the launch train under ``made``, whose sequences run in slices."""
    written = parsed.variants.written(made)
    return replace(written, added=(*written.added, *parsed.costs))


def _of_other_settings(parsed: ParsedLaunch) -> Iterator[LongSequenceAlternative]:
    """Yield two alternatives without slices: full recompute, and more context parallelism.

    The latter doubles the context-parallel size and halves the data-parallel size.
    """
    args, variants, allowed_bytes = parsed.validated, parsed.variants, parsed.allowed_bytes
    if args.recompute_granularity != "full":
        fully_recomputed = variants.with_values(WITH_FULL_RECOMPUTE)
        yield long_sequence_alternative(FULL_RECOMPUTE, fully_recomputed.variant, allowed_bytes)
    if args.data_parallel_size % 2 == 0:
        ranks = 2 * args.context_parallel_size
        words = context_parallel(ranks, args.data_parallel_size // 2)
        divided = variants.with_values({"context_parallel_size": ranks})
        yield long_sequence_alternative(words, divided.variant, allowed_bytes, is_here=False)


def what_slices_give(
    variants: LaunchVariants, baseline: Candidate, allowed_bytes: float | None
) -> str | None:
    """Return, in words, what the launch gains by slices of sequences, with flags; None if nothing.

    Slices are tried under the launch's own schedule and a few simple ones. None if slices are
    impossible, or if these schedules without slices take as little time.

    Args:
        baseline: the unchanged launch.
        allowed_bytes: bytes that a rank may take; None if not known.
    """
    names = [name for name in (baseline.family, *_SIMPLE) if entry_of(name).traits.takes_slices]
    specs = list(dict.fromkeys(names))
    sliced = alternatives_with_slices(
        lambda cut: variants.with_slices(cut).variant,
        allowed_bytes,
        cuts_to_compare(lambda cut: variants.with_slices(cut).variant),
        specs,
    )
    shortest = [one.shortest for one in sliced if one.shortest is not None]
    if not shortest:
        return None
    made = min(shortest, key=lambda one: one.step)
    if allowed_bytes is None or baseline.fullest is None or baseline.fullest <= allowed_bytes:
        uncut = long_sequence_alternative(
            WHOLE_SEQUENCES, variants.with_slices(UNCUT).variant, allowed_bytes, specs=specs
        )
        others = [baseline, *([] if uncut.shortest is None else [uncut.shortest])]
        if min(slower_by(one, made) for one in others) < WORTH_SLICES:
            return None
    words = shlex.join(variants.written(made).added)
    bubbles = [f"{candidate.report.bubble_share_makespan:.1%}" for candidate in (made, baseline)]
    text = f"with {words} a step is predicted to take {made.step / baseline.step - 1:+.1%}: "
    text += f"{bubbles[0]} bubbles in place of {bubbles[1]}"
    if made.fullest is None or baseline.fullest is None:
        return text
    taken, before = bytes_text(made.fullest), bytes_text(baseline.fullest)
    return f"{text}, {taken} on the fullest rank in place of {before}"
