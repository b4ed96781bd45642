"""Checkpoint saves between the iterations of a race of schedules, whose time does not count.

Megatron's loop saves and evaluates between two steps. A race sees an evaluation, because our
schedule runs it, but not a save.

Not patched: what is saved, and how; other work of the loop between steps, which counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core import pipeline_parallel

from megatron_ext.adapter.step.pipeline_step import PipelineStep
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch by which a race of schedules does not time iterations that save."""
    return (
        wrap(
            "megatron.training.training:save_checkpoint_and_time",
            tell_of_the_save,
            reason="a race does not time an iteration that a save follows",
        ),
    )


def tell_of_the_save(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Tell the schedule that a save follows, so that a race of schedules does not time it; then
    save."""
    step = pipeline_parallel.get_forward_backward_func()
    if isinstance(step, PipelineStep):
        step.interrupt()
    return original(*args, **kwargs)
