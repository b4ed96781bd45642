"""Beside a plan: Megatron's full recompute, and what there is in its memory instead.

Full recompute runs every layer again inside its backward pass, where all later ranks wait for it.
In the same memory a V may need nothing made again, or `transforms.recompute` less, in the bubbles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_ext.schedule.build.registry import entry_of
from megatron_ext.schedule.plan.candidate import Candidate
from megatron_ext.schedule.plan.planner import all_specs, make_plan
from megatron_ext.schedule.plan.training import Training


@dataclass(frozen=True)
class FullRecompute:
    """What it takes, and what need not be.

    Attributes:
        taken: the shortest step with ``--recompute-granularity full``; None if nothing fits.
        instead: the shortest step without it in no more memory; None if nothing fits.
    """

    taken: Candidate | None
    instead: Candidate | None


def compare_full_recompute(training: Training, room: float | None) -> FullRecompute | None:
    """None where times are measured, which say nothing of other settings; where ``training`` has
    recompute already; or where nothing fits into ``room`` bytes of a rank.

    What searches is left out: a comparison takes no longer for this.
    """
    trained = training.trained
    if trained is None or not training.is_estimate or trained.execution.recompute:
        return None
    specs = [spec for spec in all_specs() if not entry_of(spec).traits.searches]
    execution = replace(trained.execution, recompute=True)
    again = replace(training, trained=replace(trained, execution=execution)).variant
    taken = make_plan(again, room, only_promising=True, specs=specs).best
    if taken is None:
        return None
    instead = make_plan(training.variant, taken.fullest, only_promising=True, specs=specs).best
    return FullRecompute(taken, instead)
