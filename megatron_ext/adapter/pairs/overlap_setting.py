"""Pairs of passes are asked for by a flag of Megatron's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_ext.config import PipelineConfig, flag
from megatron_ext.schedule.problem import Extras

SETTING = "overlap_moe_expert_parallel_comm"
FLAG = "--overlap-moe-expert-parallel-comm"
DELAY = "delay_wgrad_compute"  # which needs the other


def requests_pairs(settings: Any) -> bool:
    """Whether ``settings``, Megatron's arguments or a config, do."""
    return getattr(settings, SETTING, None) is True


def flags_given(settings: Any) -> tuple[str, ...]:
    """The flags of ``settings`` that are about pairs."""
    given = (name for name in (SETTING, DELAY) if getattr(settings, name, None) is True)
    return tuple(f"--{name.replace('_', '-')}" for name in given)


def has_pairs(settings: Any, microbatches: int) -> bool:
    """Whether a step of so many ``microbatches`` has some, where ``settings`` ask for them. Passes
    of one microbatch need one another: a caller whose batches vary may have such a step."""
    return requests_pairs(settings) and microbatches > 1


def with_pairs(extras: Extras, settings: Any) -> Extras:
    """``extras``, and pairs where ``settings`` ask for them.

    Raises:
        ValueError: they do not go with another of ``extras``.
    """
    if not requests_pairs(settings):
        return extras
    extras = replace(extras, pairs=True)
    conflict = extras.conflict
    if conflict is not None and "pairs" in conflict.extras:
        (other,) = set(conflict.extras) - {"pairs"}
        raise ValueError(conflict.text(FLAG, flag(other)))
    return extras


def refuse_measuring(settings: Any, ours: PipelineConfig) -> None:
    """Raise ValueError if ``settings`` ask for pairs where ``ours`` measure passes one by one."""
    if requests_pairs(settings) and ours.costs.profile is not None:
        raise ValueError(
            f"{FLAG} does not go with {flag('costs')} {ours.costs}: what passes cost is measured "
            f"one by one, and two that run as one cannot be told apart; write 'estimate', or a "
            f"costs file"
        )
