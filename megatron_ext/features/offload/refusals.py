"""Settings of Megatron that activation offload refuses, and refusal of Megatron's own offload.

Megatron's own copies to the host follow the order of its own pipeline. They are refused under our
schedules, whose copies are requested by --pipeline-activation-offload.
"""

from __future__ import annotations

from typing import Any

from megatron_ext.adapter.handled_settings.feature_refusals import FeatureRefusals
from megatron_ext.adapter.handled_settings.handled_setting import HandledSetting
from megatron_ext.adapter.handled_settings.refused_setting import (
    RefusalGroup,
    RefusedSetting,
    by_option,
    by_schedule,
    drop,
)
from megatron_ext.compile.registry import ResolvedSpec
from megatron_ext.config import PipelineConfig
from megatron_ext.schedule.problem import Offload, ScheduleOptions

_WITHOUT_REFUSED = (
    RefusedSetting(
        "fine_grained_activation_offloading",
        bool,
        "its copies follow Megatron's own order of passes: write --pipeline-activation-offload "
        "full, or half, whose copies follow the schedule's",
    ),
)

_WITHOUT_OFFLOAD = "drop --pipeline-activation-offload"

_REFUSED = (
    RefusedSetting(
        "cpu_offloading",
        bool,
        "drop --cpu-offloading-num-layers: the schedule decides when activations are copied",
    ),
    *(
        RefusedSetting(name, bool, f"quantised activations are untried: {_WITHOUT_OFFLOAD}")
        for name in ("fp8", "fp4")
    ),
    drop("tp_comm_overlap", "activations in its communication buffers are untried"),
    RefusedSetting(
        "cuda_graph_impl",
        lambda value: value == "transformer_engine",
        "what a CUDA graph keeps for its backward pass stays in its memory: write "
        "--cuda-graph-impl none, or drop --pipeline-activation-offload",
    ),
)


def _no_offload(settings: Any, resolved: ResolvedSpec, options: ScheduleOptions) -> str | None:
    is_absent = options.activation_offload is Offload.NONE
    return by_schedule(settings, resolved, options) if is_absent else None


def _is_on(config: PipelineConfig) -> bool:
    return config.activation_offload is not Offload.NONE


OFFLOAD_REFUSALS = FeatureRefusals(
    _is_on,
    groups=(
        RefusalGroup("refusals without offload", _WITHOUT_REFUSED, _no_offload),
        RefusalGroup(
            "offload refusals",
            _REFUSED,
            by_option("activation_offload"),
            options=ScheduleOptions(activation_offload=Offload.FULL),
        ),
    ),
    handled=(
        HandledSetting(
            "fine_grained_activation_offloading",
            "--pipeline-activation-offload does it: all that a microbatch leaves is copied on the "
            "schedule's time, whatever offload_modules names",
            by=_is_on,
        ),
    ),
)
