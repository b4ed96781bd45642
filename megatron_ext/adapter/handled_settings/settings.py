"""Settings of Megatron that the schedule or its passes implement; each is accepted and logged.

Settings that would change layers are switched off in the configs from which models are built.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from megatron_ext.adapter.handled_settings.handled_setting import HandledSetting
from megatron_ext.adapter.refusals import FEATURES
from megatron_ext.base.logger import logger
from megatron_ext.config import PipelineConfig

_DRAWS = "drawn slice by slice, other numbers than without --pipeline-slices"


def _cuts_sequences(config: PipelineConfig) -> bool:
    return config.slices > 1


_PLACES_W = "the schedule says when weight gradients are computed"

HANDLED_SETTINGS = (
    HandledSetting(
        "defer_embedding_wgrad_compute",
        f"{_PLACES_W}, the output layer's too; wgrad_deferral_limit is not read",
    ),
    HandledSetting("delay_wgrad_compute", _PLACES_W),
    HandledSetting(
        "overlap_moe_expert_parallel_comm",
        "experimental, no GPU has run it: forward and backward passes that the schedule puts side "
        "by side run as one, and the all-to-all of one hides behind the other's compute",
        by=lambda config: config.resolved_spec.example.chunks > 1,
        stays=True,
    ),
    HandledSetting(
        "overlap_dispatch_backward_with_experts_wgrad", f"{_PLACES_W}, those of experts too"
    ),
    HandledSetting(
        "tp_comm_overlap",
        "layers whose operands lie in Userbuffers keep whole backward passes; W has the others' "
        "weight gradients (--pipeline-report-split counts them)",
        by=lambda config: config.splits_backward,
        stays=True,
    ),
    HandledSetting("hidden_dropout", _DRAWS, by=_cuts_sequences, stays=True),
    HandledSetting("attention_dropout", _DRAWS, by=_cuts_sequences, stays=True),
    *(setting for feature in FEATURES for setting in feature.handled),
)


def apply_handled_settings(settings: Any, config: PipelineConfig, *, tells: bool = True) -> None:
    """Switch off Megatron's settings that ``config`` implements itself.

    ``settings`` are Megatron's arguments or a config, changed in place. If ``tells``, global rank 0
    logs each setting once per process.
    """
    for entry in HANDLED_SETTINGS:
        if getattr(settings, entry.setting, False) and entry.by(config):
            if tells:
                _tell(f"{entry.setting}: {entry.text}")
            if not entry.stays:
                setattr(settings, entry.setting, False)


@functools.cache
def _tell(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        logger.info(line)
