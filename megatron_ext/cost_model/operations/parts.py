"""Operations of the parts of a layer, by the symbols of hybrid patterns. A new kind of layer is one
more symbol here, and nothing else counts layers by their kind."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from megatron_ext.cost_model.execution import Execution
from megatron_ext.cost_model.model import Model
from megatron_ext.cost_model.operations.attention import attention, latent_attention
from megatron_ext.cost_model.operations.mlp import experts, mlp
from megatron_ext.cost_model.operations.operation import Part
from megatron_ext.cost_model.operations.recurrent import delta_net, mamba

_CAPTURED = {"M": "mamba", "-": "mlp", "E": "moe"}  # Megatron's names of layer types in CUDA graphs


@lru_cache(maxsize=1024)
def part_of(symbol: str, model: Model, execution: Execution) -> Part:
    """Return operations and exchanges of the layer part, such as ``*`` for attention, of
    ``symbol``."""
    match symbol:
        case "*" | "w" if not model.multi_latent_attention:
            part = attention(model, execution, is_sliding=symbol == "w")
        case "*" | "w" | "+":
            part = latent_attention(model, execution, is_sliding=symbol == "w")
        case "G":
            part = delta_net(model, execution)
        case "M":
            part = mamba(model, execution)
        case "-":
            part = mlp(model, execution)
        case _:
            assert symbol == "E", symbol
            part = experts(model, execution)
    if _CAPTURED.get(symbol, "attn") in execution.captured:
        return part.with_whole_backward()
    # A CUDA graph of the router contains the shared expert, too.
    if symbol == "E" and "moe_router" in execution.captured:
        kept = [
            replace(o, is_unsplit=o.is_unsplit or "shared_experts" in o.modules)
            for o in part.operations
        ]
        return replace(part, operations=tuple(kept))
    return part
