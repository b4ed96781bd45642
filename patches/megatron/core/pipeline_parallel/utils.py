"""Rank of the first stage as Megatron's functions with a process group as argument report it.

Not patched: `is_pp_last_stage` and `get_pp_last_rank` (the last stage stays on the last rank),
`is_vp_first_stage` and `is_vp_last_stage` (the first stage is its rank's first chunk, the last its
rank's last), `get_pp_next_rank` and similar (for Megatron's messages; ours have their own
channels).
"""

from __future__ import annotations

import torch.distributed as dist
from megatron.core.utils import get_pg_rank, get_pg_size

from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, replace


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch of `is_pp_first_stage`, true on the rank where stage 0 is placed."""
    resolved = config.resolved_spec

    def is_pp_first_stage(pp_group: dist.ProcessGroup | None) -> bool:
        ranks = get_pg_size(pp_group)
        return ranks == 1 or get_pg_rank(pp_group) == resolved.place(ranks).rank_of[0]

    return (
        replace(
            "megatron.core.pipeline_parallel.utils:is_pp_first_stage",
            is_pp_first_stage,
            reason="the schedule's placement says which rank has the first stage",
            signature="(pp_group)",
        ),
    )
