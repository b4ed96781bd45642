"""Comparison of all ranks' launch settings, before Megatron creates its process groups.

Ranks with different schedules create different groups, and would wait for each other until torch's
timeout. Callers that create groups without `initialize_model_parallel` are not compared here; their
programs are compared before the first step.

Not patched: torch's init_process_group, which others call too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megatron_ext.adapter.rank_settings.launch_facts import refuse_other_launches
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch that compares all ranks' settings before Megatron creates groups."""

    def compare_first(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if dist.is_initialized():  # without process groups Megatron reports what is missing
            refuse_other_launches(config)
        original(*args, **kwargs)

    return (
        wrap(
            "megatron.core.parallel_state:initialize_model_parallel",
            compare_first,
            reason="ranks that are launched differently end with an error instead of a hang",
        ),
    )
