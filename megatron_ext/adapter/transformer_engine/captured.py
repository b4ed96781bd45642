"""Parts of a model that are in per-layer CUDA graphs, according to Megatron's settings.

A captured layer computes its weight gradients with those of its input, as one graph, so nothing of
it waits for W. What a schedule gains by W depends on which parts are captured.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

IMPLEMENTATION = "transformer_engine"
GRAPHS = f"--cuda-graph-impl {IMPLEMENTATION}"
_WHOLE_LAYERS = frozenset({"attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba"})


def captures(settings: Any) -> bool:
    """Return whether Megatron's arguments or config ``settings`` request per-layer CUDA graphs."""
    return getattr(settings, "cuda_graph_impl", None) == IMPLEMENTATION


def is_one_graph(settings: Any) -> bool:
    """Return whether ``settings`` request one graph of all passes of a step."""
    return getattr(settings, "cuda_graph_impl", None) == "full_iteration"


def captured_parts(settings: Any) -> frozenset[str]:
    """Return the parts of layers that are captured in CUDA graphs, by Megatron's names.

    The names are attn, mlp, moe, moe_router, moe_preprocess and mamba. All six are returned if
    whole layers are captured.
    """
    if not captures(settings):
        return frozenset()
    named = getattr(settings, "cuda_graph_modules", None)
    if named is None:  # Megatron 0.18 has the setting under another name
        named = getattr(settings, "cuda_graph_scope", None)
    parts = frozenset(_names(named))
    return parts - {"full"} or _WHOLE_LAYERS


def _names(parts: Any) -> Iterable[str]:
    if not parts:
        return ()
    if isinstance(parts, str):
        return parts.split(",")
    return (getattr(part, "name", part) for part in parts)


def left_to_w(settings: Any) -> str:
    """Return one line that tells which weight gradients wait for W passes despite CUDA graphs."""
    parts = captured_parts(settings)
    routed = getattr(settings, "num_experts", None) or getattr(settings, "num_moe_experts", None)
    left = [] if "attn" in parts else ["attention"]
    # With a list of frequencies some layers have a dense MLP, and others have experts.
    if not routed or isinstance(settings.moe_layer_freq, list):
        left += [] if "mlp" in parts else ["dense MLPs"]
    if routed and "moe" not in parts:
        left.append("experts")
        if getattr(settings, "moe_shared_expert_overlap", False) or "moe_router" not in parts:
            left.append("shared experts")
    held = "whole layers" if parts == _WHOLE_LAYERS else ", ".join(sorted(parts))
    rest = f"W has those of {', '.join(left)}" if left else "no layer leaves any to W"
    return (
        f"CUDA graphs hold {held}: their weight gradients are computed with their input's; {rest}"
    )


def captured_parameters(chunks: Iterable[torch.nn.Module]) -> set[Tensor]:
    """Return the parameters of ``chunks`` whose modules are captured in CUDA graphs now."""
    return {
        parameter
        for chunk in chunks
        for layer in _modules(chunk)
        if getattr(layer, "cuda_graphs", None)
        for part in layer._get_submodules_under_cudagraphs()
        for parameter in part.parameters()
    }


def _modules(chunk: torch.nn.Module) -> Iterable[Any]:
    return chunk.modules()
