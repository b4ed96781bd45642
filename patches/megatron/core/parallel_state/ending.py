"""Where Megatron's process groups end, a training of ours ends with them.

Whoever trains again in the same process (--inprocess-restart, a caller of Megatron's) ends them
first. A training also ends where torch's groups do, which it notices in its next step.

Not patched: torch's destroy_process_group, which ends our groups as it ends all others.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_ext.adapter.step.training import end_trainings
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """The patch that ends our trainings."""
    return (
        wrap(
            "megatron.core.parallel_state:destroy_model_parallel",
            end_trainings_first,
            reason="channels, watchdog and programs end with the groups they are of",
            signature="()",
        ),
    )


def end_trainings_first(original: Callable[[], None]) -> None:
    """``original``, with nothing of ours left in its groups."""
    end_trainings()
    original()
