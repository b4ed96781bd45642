"""Gain of a launch command by passes that overlap, which hide the messages between experts, and its
loss without such passes.

Overlapped passes hide messages between experts, but need virtual stages and more memory. The launch
is therefore compared with the flag and without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from megatron_ext.adapter.pairs.overlap_setting import DELAY, SETTING, requests_pairs
from megatron_ext.base.words import argument_flag
from megatron_ext.compile.registry import Maturity, entries
from megatron_ext.launch.planner.alternatives.changed import Changed
from megatron_ext.planner.candidate import Plan
from megatron_ext.planner.planner import make_plan

if TYPE_CHECKING:
    from megatron_ext.launch.planner.variants import LaunchVariants

SHARED = "moe_shared_expert_overlap"
_STOCK = "interleaved"


def other_pairs(
    variants: LaunchVariants, plan: Plan, allowed_bytes: float | None, *, is_long: bool = False
) -> Changed | None:
    """Return the launch with overlapped passes if it has none, and without them if it has some.

    None if the experts are on one rank. Its schedules are Megatron's own with overlapped passes,
    and the best of all. They fit into ``allowed_bytes`` or, if that is not known, into the memory
    of the schedule that ``plan`` chooses. Schedules that search are ignored. If ``is_long``, so
    that comparing all schedules takes a minute, schedules that are not stable and schedules that
    need --pipeline-recompute to fit are ignored, too.
    """
    args = variants.args
    if not args.num_experts or (args.expert_model_parallel_size or 1) == 1:
        return None
    is_requested = requests_pairs(args)
    changes = {SETTING: not is_requested, DELAY: False}
    has_shared = not is_requested and args.moe_shared_expert_overlap
    # Megatron accepts either the overlap of the shared expert or the overlap of passes.
    if has_shared:
        changes[SHARED] = False
    other = variants.with_values(changes)
    if is_long:
        other = replace(other, maturities=frozenset([Maturity.STABLE]), tries_recompute=False)
    if allowed_bytes is None and plan.best is not None:
        allowed_bytes = plan.best.fullest
    specs = list(_specs(with_pairs=not is_requested))
    made = make_plan(other.variant, allowed_bytes, only_promising=is_requested, specs=specs)
    stock = () if is_requested else (c for c in made.candidates if c.family == _STOCK)
    dropped = (argument_flag(SHARED),) if has_shared else ()
    return Changed(other, tuple(dict.fromkeys((*islice(stock, 1), *made.tied))), dropped)


def _specs(*, with_pairs: bool) -> Iterator[str]:
    for name, entry in entries().items():
        if not entry.traits.searches and (entry.traits.keeps_pairs or not with_pairs):
            yield name
