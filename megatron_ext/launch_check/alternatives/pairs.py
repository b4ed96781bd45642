"""What a launch line's experts could hide of their messages, or hide no longer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megatron_ext.adapter.pairs.overlap_setting import (
    DELAY,
    FLAG,
    SETTING,
    flags_given,
    requests_pairs,
)
from megatron_ext.schedule.build.registry import Mark, entries
from megatron_ext.schedule.plan.candidate import Candidate, Plan
from megatron_ext.schedule.plan.planner import make_plan
from megatron_ext.schedule.plan.recommendation import flags_of

if TYPE_CHECKING:
    from megatron_ext.launch_check.variants import LineVariants

_STOCK = "interleaved"


@dataclass(frozen=True)
class OtherPairs:
    """A line whose passes run in pairs, where they do not; and without, where they do.

    Attributes:
        is_asked: whether the line itself asks for pairs.
        taken: the shortest step; None: there is none.
        stock: that of Megatron's own schedule with pairs, where the line has none.
        flags, dropped: what is written for ``taken``, and what goes.
        why_none: if nothing can be taken.
    """

    is_asked: bool
    taken: Candidate | None = None
    stock: Candidate | None = None
    flags: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    why_none: str = ""

    def as_data(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        return {
            "is_asked": self.is_asked,
            "schedule": self.taken and self.taken.schedule,
            "step": self.taken and self.taken.step,
            "fullest": self.taken and self.taken.fullest,
            "step_of_stock": self.stock and self.stock.step,
            "flags": self.flags,
            "dropped": self.dropped,
            "why_none": self.why_none,
        }


def flags_beside(args: Any, made: Candidate) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What is written for ``made`` on the line of ``args``, and what goes. A flag for pairs that
    the line has already is not written again; it goes where ``made`` has none."""
    words = flags_of(made, None)
    if not requests_pairs(args):
        return words, ()
    if not made.report.pairs:
        return words, flags_given(args)
    return tuple(word for word in words if word != FLAG), ()


def other_pairs(
    line: LineVariants, plan: Plan, room: float | None, *, is_long: bool = False
) -> OtherPairs | None:
    """The line with the flag where it has none, and without where it has, in ``room``, or where
    that is not known, in what the choice of ``plan``, that of the line, takes. None where experts
    are on one rank. What searches is left out; where plans are long, so is what is not stable, or
    would have to be made to fit."""
    args = line.args
    if not args.num_experts or (args.expert_model_parallel_size or 1) == 1:
        return None
    is_asked = requests_pairs(args)
    other = line.with_values({SETTING: not is_asked, DELAY: False})
    if is_long:
        other = replace(other, marks=frozenset([Mark.STABLE]), tries_recompute=False)
    if room is None and plan.best is not None:
        room = plan.best.fullest
    specs = list(_specs(with_pairs=not is_asked))
    made = make_plan(other.variant, room, only_promising=is_asked, specs=specs)
    if made.best is None:
        return OtherPairs(is_asked, why_none=next(iter(made.refusals.values()), ""))
    rewritten = other.rewritten(made.best.schedule)
    # The flag is written once, whether or not the best schedule keeps pairs.
    own = (word for word in flags_of(made.best, None) if word != FLAG)
    flags = (*own, *rewritten.added)
    if not is_asked:
        stock = next((c for c in made.candidates if c.family == _STOCK), None)
        return OtherPairs(is_asked, made.best, stock, (*flags, FLAG), rewritten.dropped)
    dropped = (*rewritten.dropped, *flags_given(args))
    return OtherPairs(is_asked, made.best, None, flags, dropped)


def _specs(*, with_pairs: bool) -> Iterator[str]:
    for name, entry in entries().items():
        if not entry.traits.searches and (entry.traits.keeps_pairs or not with_pairs):
            yield name
