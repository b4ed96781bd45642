"""The plan of a launch, made by what is imported only then."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ext.config import PipelineConfig


def choose_plan(
    argv: Sequence[str], config: PipelineConfig, world_size: int
) -> tuple[tuple[str, ...], str]:
    """For `megatron_ext.launch`: the flags to add to ``argv``, and why."""
    from megatron_ext.launch_check.plan import choose_for  # torch and Megatron

    chosen = choose_for(argv, config, world_size)
    return chosen.flags, chosen.why
