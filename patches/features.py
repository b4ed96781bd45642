"""One table: each feature, its patches, when it is wanted; and what a schedule refuses.

Refused is the default for whatever nobody has made work together. A refusal is one line: what
clashes, and what to write instead.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch
from megatron_ext.schedule.registry import Choice


@dataclass(frozen=True)
class Feature:
    """Something a user switches on. ``module`` has ``patches(config) -> tuple[Patch, ...]``."""

    name: str
    module: str
    wanted: Callable[[PipelineConfig], bool]

    def patches(self, config: PipelineConfig) -> tuple[Patch, ...]:
        patches: tuple[Patch, ...] = importlib.import_module(self.module).patches(config)
        return patches


_HERE = "megatron_ext.patches.megatron"

FEATURES = (
    Feature("flags", f"{_HERE}.training.arguments", lambda config: True),
    Feature(
        "schedule",
        f"{_HERE}.core.pipeline_parallel.schedules",
        lambda config: config.schedule is not None,
    ),
    Feature(
        "split backward of local linear layers",
        f"{_HERE}.core.tensor_parallel.layers",
        lambda config: config.schedule is not None and config.choice().splits_backward,
    ),
)


def wanted_patches(config: PipelineConfig) -> list[Patch]:
    """The patches of all features that ``config`` wants."""
    return [
        patch for feature in FEATURES if feature.wanted(config) for patch in feature.patches(config)
    ]


@dataclass(frozen=True)
class Refusal:
    """A setting that does not go with our schedules.

    ``setting`` is its name in Megatron's arguments and configs, ``unsupported`` tells of a value
    whether it is refused (it is not called where the setting does not exist), ``instead`` what to
    write. ``split_only``: schedules that do not split the backward can have it.
    """

    setting: str
    unsupported: Callable[[Any], bool]
    instead: str
    split_only: bool = False


REFUSALS = (
    Refusal(
        "transformer_impl",
        lambda value: value != "local",
        "the backward of Transformer Engine's layers is not split yet: "
        "write --transformer-impl local, or use 1f1b or gpipe",
        split_only=True,
    ),
    Refusal(
        "gradient_accumulation_fusion",
        bool,
        "add --no-gradient-accumulation-fusion",
        split_only=True,
    ),
    Refusal("num_moe_experts", bool, "use 1f1b or gpipe for MoE models", split_only=True),
    Refusal("defer_embedding_wgrad_compute", bool, "drop --defer-embedding-wgrad-compute"),
    Refusal("delay_wgrad_compute", bool, "drop --delay-wgrad-compute: the schedule places W"),
    Refusal("virtual_pipeline_model_parallel_size", bool, "drop the virtual-stage flags"),
    Refusal("overlap_moe_expert_parallel_comm", bool, "drop --overlap-moe-expert-parallel-comm"),
    Refusal("hybrid_context_parallel", bool, "drop --hybrid-context-parallel"),
    Refusal(
        "fine_grained_activation_offloading", bool, "drop --fine-grained-activation-offloading"
    ),
    Refusal("moe_paged_stash", bool, "drop --moe-paged-stash"),
    Refusal(
        "cuda_graph_impl",
        lambda value: value not in (None, "none"),
        "write --cuda-graph-impl none: Megatron captures its own pipeline order",
    ),
    Refusal(
        "num_microbatches_with_partial_activation_checkpoints",
        bool,
        "drop --num-microbatches-with-partial-activation-checkpoints",
    ),
    Refusal("mtp_num_layers", bool, "drop --mtp-num-layers"),
    Refusal("mtp_standalone", bool, "drop the standalone MTP stage from the layout"),
    Refusal("use_ring_exchange_p2p", bool, "drop --use-ring-exchange-p2p"),
    Refusal("use_megatron_fsdp", bool, "drop --use-megatron-fsdp"),
    Refusal("use_torch_fsdp2", bool, "drop --use-torch-fsdp2"),
    Refusal("yaml_cfg", bool, "give Megatron's settings as flags, not by --yaml-cfg"),
)


def refuse(settings: Any, choice: Choice) -> None:
    """Raise ValueError for the first of ``settings`` that ``choice`` cannot honour.

    ``settings`` are Megatron's parsed arguments or a TransformerConfig.
    """
    placement = choice.place(settings.pipeline_model_parallel_size)
    if placement.rank_of != tuple(range(placement.ranks)):
        raise ValueError(
            f"--pipeline-schedule {choice.spec} puts {placement.chunks} stages on a rank or in "
            f"another order, and Megatron runs one stage a rank, in order, so far: use a schedule "
            f"whose placement is a line ('megatron-ext schedules' tells)"
        )
    for refusal in REFUSALS:
        if refusal.split_only and not choice.splits_backward:
            continue
        value = getattr(settings, refusal.setting, None)
        if value is not None and refusal.unsupported(value):
            raise ValueError(
                f"--pipeline-schedule {choice.spec} does not go with "
                f"{refusal.setting}={value}: {refusal.instead}"
            )
