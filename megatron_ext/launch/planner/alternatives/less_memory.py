"""Changes to a launch that no schedule makes fit into memory: recompute, more ranks, smaller
microbatches.

"Does not fit" is no advice. The smallest change of each kind that fits is found, under the schedule
of the launch, and named with the memory that is then taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_ext.base.words import argument_flag, bytes_text
from megatron_ext.launch.planner.alternatives.without_full_recompute import (
    WITH_FULL_RECOMPUTE,
)
from megatron_ext.planner.candidate import VocabMethod
from megatron_ext.planner.fitting import consider

if TYPE_CHECKING:
    from megatron_ext.launch.planner.variants import LaunchVariants


@dataclass(frozen=True, eq=False)
class _Gift:
    """Change of a launch that saves memory: in words, and as values of Megatron's arguments."""

    words: str
    values: Mapping[str, Any]

    def and_(self, other: _Gift) -> _Gift:
        return _Gift(f"{self.words} and {other.words}", {**self.values, **other.values})


_DOUBLINGS = (2, 4)  # factors by which the number of ranks is raised


def _gifts(args: Any) -> Iterator[list[_Gift]]:
    """Yield each kind of change that saves memory, as a list from the smallest change on."""
    if args.recompute_granularity != "full":
        yield [_Gift("--recompute-granularity full", WITH_FULL_RECOMPUTE)]
    for name in ("tensor", "expert", "pipeline"):
        setting = f"{name}_model_parallel_size"
        sizes = [times * getattr(args, setting) for times in _DOUBLINGS]
        if name == "expert":
            sizes = [size for size in sizes if args.num_experts and args.num_experts % size == 0]
        yield [_Gift(f"{argument_flag(setting)} {size}", {setting: size}) for size in sizes]
    if not args.use_distributed_optimizer:
        yield [_Gift("--use-distributed-optimizer", {"use_distributed_optimizer": True})]
    if args.micro_batch_size > 1:
        yield [_Gift("--micro-batch-size 1", {"micro_batch_size": 1})]


def what_would_fit(variants: LaunchVariants, allowed_bytes: float | None) -> Iterator[str]:
    """Yield a text for each kind of change by which the launch would fit into memory.

    The text has the smallest change that fits, and the memory of the fullest rank under the
    launch's schedule; least memory comes first. If no change suffices, the one that takes least
    memory is combined with each other one.
    """
    before = _fullest(variants)
    if allowed_bytes is None or before is None:
        return
    taken: dict[_Gift, float] = {}

    def least(gifts: Sequence[_Gift]) -> _Gift | None:
        """Return the first of ``gifts`` (changes) that fits, or else the last that saves memory."""
        helps = None
        for gift in gifts:
            fullest = _fullest(variants.with_values(gift.values))
            if fullest is not None and fullest < before:
                taken[gift], helps = fullest, gift
                if fullest <= allowed_bytes:
                    break
        return helps

    leanest = sorted(filter(None, map(least, _gifts(variants.args))), key=lambda gift: taken[gift])
    if leanest and taken[leanest[0]] > allowed_bytes:
        pairs = (least([leanest[0].and_(other)]) for other in leanest[1:])
        leanest += [gift for gift in pairs if gift is not None and taken[gift] <= allowed_bytes]
    for gift in leanest:
        excess = taken[gift] - allowed_bytes
        fits = "which fits" if excess <= 0 else f"{bytes_text(excess)} too much"
        yield f"{gift.words}: the fullest rank would take {bytes_text(taken[gift])}, {fits}"


def _fullest(variants: LaunchVariants) -> float | None:
    """Return the bytes of the launch's fullest rank; None if the launch cannot train."""
    assert variants.launch_schedule is not None
    try:
        variant = variants.variant(variants.launch_schedule.partition(":")[0], VocabMethod.NAIVE)
        return None if variant is None else consider(variant, VocabMethod.NAIVE).fullest
    except ValueError:
        return None
