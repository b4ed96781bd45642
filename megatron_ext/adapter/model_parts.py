"""What is known of a model chunk: its language model and its output layer, if it has them.

A chunk is any module with set_input_tensor. A multimodal one wraps a language model; a caller's own
may have nothing that is known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ext.adapter.vocabulary_rows import embedding_part

# Of DDP and mixed precision; of Megatron's and Megatron-Bridge's multimodal models.
_WITHIN = ("module", "language_model", "thinker")


@dataclass(frozen=True)
class ChunkSize:
    """How large a model chunk is.

    Attributes:
        model: the class of the model.
        layers: transformer layers of its language model; None where it has none that is known.
        rows: of its output layer, 0 without one.
        parameters: elements of all parameters.
        beside: elements of those that are not its language model's.
    """

    model: str
    layers: int | None
    rows: int
    parameters: int
    beside: int


def language_model(chunk: torch.nn.Module) -> Any | None:
    """What has Megatron's layers in ``chunk``, however deeply wrapped: a GPTModel or its like."""
    model: Any = chunk
    while (inner := _first_within(model, _WITHIN)) is not None:
        model = inner
    return model if hasattr(getattr(model, "decoder", None), "layers") else None


def output_layer(chunk: torch.nn.Module) -> Any | None:
    """What makes the logits in ``chunk``, found by the name that Megatron's models give it."""
    for name, module in (language_model(chunk) or chunk).named_modules():
        if name.rpartition(".")[2] == "output_layer":
            return module
    return None


def size_of(chunk: torch.nn.Module) -> ChunkSize:
    """The size of one rank's ``chunk``."""
    model = language_model(chunk)
    rows = getattr(output_layer(chunk), "output_size_per_partition", 0)
    if rows == 0 and (part := embedding_part(chunk)) is not None:  # which is the output layer's too
        rows = part.num_embeddings_per_partition
    parameters, known = (_elements(module) for module in (chunk, model))
    wrapped: Any = chunk
    while (inner := _first_within(wrapped, ("module",))) is not None:
        wrapped = inner
    layers = None if model is None else len(model.decoder.layers)
    return ChunkSize(type(wrapped).__name__, layers, rows, parameters, parameters - known)


def _first_within(model: Any, names: Sequence[str]) -> Any | None:
    modules = (getattr(model, name, None) for name in names)
    return next((module for module in modules if isinstance(module, torch.nn.Module)), None)


def _elements(module: torch.nn.Module | None) -> int:
    return 0 if module is None else sum(weight.numel() for weight in module.parameters())
