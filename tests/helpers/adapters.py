"""Low-rank adapters of linear layers, and models of which one part is trained and the other
frozen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig

LINEAR = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
RANK = 4  # rank of an adapter's two matrices


class Adapter(torch.nn.Module):
    """An adapter like Bridge's ParallelLinearAdapter."""

    def __init__(self, wide: int, out: int, config: TransformerConfig) -> None:
        super().__init__()
        init = {"config": config, "init_method": torch.nn.init.zeros_, "bias": False}
        self.linear_in = ColumnParallelLinear(wide, RANK, gather_output=True, **init)
        self.linear_out = ColumnParallelLinear(RANK, out, **init)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_out(self.linear_in(x)[0])[0]


class Adapted(torch.nn.Module):
    """A linear layer with an adapter, like Bridge's LoRALinear."""

    def __init__(self, to_wrap: Any, config: TransformerConfig) -> None:
        super().__init__()
        self.to_wrap = to_wrap
        out, wide = to_wrap.weight.shape
        self.adapter = Adapter(wide, out, config)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = self.to_wrap(x)
        return output + self.adapter(x), bias


def adapt(chunk: Any, linear: Sequence[str] = LINEAR) -> None:
    """Add an adapter to each linear layer named in ``linear`` in the layers of ``chunk``."""
    for module in list(chunk.decoder.modules()):
        for name in linear:
            if hasattr(module, name):
                setattr(module, name, Adapted(getattr(module, name), chunk.config))


def is_adapter(name: str) -> bool:
    return ".adapter." in name


def layer_of(name: str) -> int:
    """Return the number of the layer of the parameter ``name``, from 1; 0 before the layers, 99
    after them."""
    where, *rest = name.split(".")
    if where == "decoder" and rest[0] == "layers":
        return int(rest[1])
    return 0 if where == "embedding" else 99


def above_frozen_layers(name: str) -> bool:
    """Return whether the parameter ``name`` is trained above frozen layers: it is neither of an
    adapter, nor of the embedding or the first three layers."""
    return not is_adapter(name) and layer_of(name) > 3
