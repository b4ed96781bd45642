"""Settings that are allowed with our schedules but have not been tried with them.

Some settings are neither refused nor covered by a test: kernels that need a GPU, optimizers,
dispatchers. Refusing them all would refuse launches that work. So each such setting has a sentence
on how far it was tried, which doctor prints for a command with the setting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Untried:
    """Setting of Megatron that is allowed, but has not been tried with our schedules.

    ``setting`` is its name in Megatron's arguments, ``is_on`` tells whether a value is concerned,
    and ``text`` says how far the setting has been tried.
    """

    setting: str
    is_on: Callable[[Any], bool]
    text: str


UNTRIED = (
    *(
        Untried(
            name,
            bool,
            f"{name.upper()}'s kernels are untried, and amaxes reduced over ranks, and parameters "
            f"gathered in {name.upper()}: its recipes are tested on the CPU, with torch's "
            "operations in the kernels' place",
        )
        for name in ("fp8", "fp4")
    ),
    Untried(
        "transformer_impl",
        lambda value: value == "transformer_engine",
        "Transformer Engine's own kernels are untried: its layers are tested on the CPU, with "
        "torch's operations in their place",
    ),
    Untried(
        "cuda_graph_impl",
        lambda value: value == "transformer_engine",
        "capture and replay of CUDA graphs are untried: their order and their memory are tested on "
        "the CPU, with layers that are executed in place of each replay",
    ),
    Untried(
        "experimental_attention_variant",
        lambda value: value != "gated_delta_net",
        "experimental attention other than gated_delta_net is untried",
    ),
    Untried(
        "hybrid_layer_pattern",
        lambda value: not set(value) <= set("*-EG|/"),
        "hybrid models are untried with layers other than *, -, E and G: for M there is a test, "
        "which needs GPUs",
    ),
    Untried("heterogeneous_layers_config_path", bool, "heterogeneous layers are untried"),
    Untried(
        "moe_token_dispatcher_type",
        lambda value: value == "flex",
        "DeepEP's and HybridEP's own kernels are untried: the flex dispatcher is tested on the "
        "CPU, with gloo's all-to-all in their place",
    ),
    Untried(
        "overlap_moe_expert_parallel_comm",
        bool,
        "passes that run as one are untried on a GPU: what they compute is tested on the CPU, "
        "and a model of their two streams",
    ),
    Untried(
        "moe_flex_dispatcher_backend",
        lambda value: value == "ncclep",
        "NCCL EP is untried: DeepEP and HybridEP are tested, with gloo in their place",
    ),
    Untried(
        "optimizer",
        lambda value: value not in ("adam", "sgd", "muon", "dist_muon"),
        "optimizers other than adam, sgd and muon are untried",
    ),
    Untried(
        "inprocess_restart",
        bool,
        "restarts within the process are untried with nvidia-resiliency-ext: what is tested is a "
        "second training in one process",
    ),
)


def untried(args: Any) -> list[Untried]:
    """Return the untried settings that are on in ``args``, Megatron's arguments."""
    return [
        entry
        for entry in UNTRIED
        if (value := getattr(args, entry.setting, None)) is not None and entry.is_on(value)
    ]
