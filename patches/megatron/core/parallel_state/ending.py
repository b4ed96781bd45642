"""End of our training when Megatron's process groups are destroyed.

A caller that trains again in the same process (--inprocess-restart, a caller of Megatron) destroys
them first. A training also ends when torch's groups are gone, which it notices in its next step.

Not patched: torch's destroy_process_group, which ends our groups as it ends all others.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_ext.adapter.step.pipeline_training import end_trainings
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch that ends our trainings when Megatron destroys its process groups."""
    return (
        wrap(
            "megatron.core.parallel_state:destroy_model_parallel",
            end_trainings_first,
            reason="channels, watchdog and programs end with Megatron's process groups",
            signature="()",
        ),
    )


def end_trainings_first(original: Callable[[], None]) -> None:
    """End our trainings, then run ``original``, which destroys Megatron's process groups."""
    end_trainings()
    original()
