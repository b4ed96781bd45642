"""What is known of a model chunk: its language model and its output layer, if it has them.

A chunk is any module with set_input_tensor. A multimodal one wraps a language model; a caller's own
may have nothing that is known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
        head_is_looked_up: of the function of that name.
    """

    model: str
    layers: int | None
    rows: int
    parameters: int
    beside: int
    head_is_looked_up: bool = False


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


def head_is_looked_up(chunk: torch.nn.Module) -> bool:
    """Whether the output layer of ``chunk`` uses the table of look-ups of the same stage: those of
    tied multi-token prediction.

    Autograd sums what both bring to its gradient. A W pass would add the output layer's apart, so
    its costs are to say that there is none.
    """
    model = language_model(chunk)
    looks_up: bool = getattr(model, "mtp_process", False)
    is_tied: bool = getattr(model, "share_embeddings_and_output_weights", False)
    return looks_up and is_tied


def unused_heads(chunks: Sequence[torch.nn.Module]) -> frozenset[Tensor]:
    """The weights that Megatron gives output layers of ``chunks`` which use look-ups' tables."""
    heads = [output_layer(chunk) for chunk in chunks if head_is_looked_up(chunk)]
    return frozenset(head.weight for head in heads if head is not None)


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
    name, beside = type(wrapped).__name__, parameters - known
    return ChunkSize(name, layers, rows, parameters, beside, head_is_looked_up(chunk))


def _first_within(model: Any, names: Sequence[str]) -> Any | None:
    modules = (getattr(model, name, None) for name in names)
    return next((module for module in modules if isinstance(module, torch.nn.Module)), None)


def _elements(module: torch.nn.Module | None) -> int:
    return 0 if module is None else sum(weight.numel() for weight in module.parameters())
