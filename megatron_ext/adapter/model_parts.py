"""What is known of a model chunk: its language model and its output layer, if it has them.

A chunk is any module with set_input_tensor. A multimodal one wraps a language model; a caller's own
may have nothing that is known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_ext.adapter.vocabulary_rows import embedding_part

# Of DDP and mixed precision; of Megatron's and Megatron-Bridge's multimodal models.
_WITHIN = ("module", "language_model", "thinker")
_MATRICES = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@dataclass(frozen=True)
class ChunkSize:
    """How large a model chunk is.

    Attributes:
        model: the class of the model.
        layers: transformer layers of its language model; None where it has none that is known.
        rows: of its output layer, 0 without one.
        parameters: elements of all parameters.
        beside: elements of those that are not its language model's.
        symbols: of a hybrid model's layers, as its pattern has them.
        head_is_looked_up: of the function of that name.
        trained_matrices: how much of the matrices of its layers is trained, from 0 to 1.
        reached: how much of its layers needs the gradient, from 0 to 1, were nothing before it
            trained: those from the first trained one on.
        head_is_trained: whether its output layer is, if it has one.
        unkept: of the matrices of its layers, by their names, those whose inputs nobody keeps.
        settings: Megatron's arguments that its language model has, and a TransformerConfig has not.
    """

    model: str
    layers: int | None
    rows: int
    parameters: int
    beside: int
    symbols: str = ""
    head_is_looked_up: bool = False
    trained_matrices: float = 1.0
    reached: float = 1.0
    head_is_trained: bool = True
    unkept: frozenset[str] = frozenset()
    settings: tuple[tuple[str, object], ...] = ()


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


def predicts_further(chunk: torch.nn.Module) -> bool:
    """Whether ``chunk`` has multi-token prediction."""
    predicts: bool = getattr(language_model(chunk), "mtp_process", False)
    return predicts


def head_is_looked_up(chunk: torch.nn.Module) -> bool:
    """Whether the output layer of ``chunk`` uses the table of look-ups of the same stage: those of
    tied multi-token prediction.

    Autograd sums what both bring to its gradient. A W pass would add the output layer's apart, so
    its costs are to say that there is none.
    """
    model = language_model(chunk)
    is_tied: bool = getattr(model, "share_embeddings_and_output_weights", False)
    return is_tied and predicts_further(chunk)


def unused_heads(chunks: Sequence[torch.nn.Module]) -> frozenset[Tensor]:
    """The weights that Megatron gives output layers of ``chunks`` which use look-ups' tables."""
    heads = [output_layer(chunk) for chunk in chunks if head_is_looked_up(chunk)]
    return frozenset(head.weight for head in heads if head is not None)


def is_trained(chunk: torch.nn.Module) -> bool:
    """Whether any parameter of ``chunk`` is."""
    return any(weight.requires_grad for weight in chunk.parameters())


def may_lose_gradients(chunk: torch.nn.Module) -> bool:
    """Whether ``chunk`` may give trained weights no gradient if its input needs none.

    Megatron's recompute makes none of what it recomputes then (torch's reentrant rule); what a
    model that is not known does is not known.
    """
    config = getattr(language_model(chunk), "config", None)
    return getattr(config, "recompute_granularity", "unknown") is not None


def size_of(chunk: torch.nn.Module) -> ChunkSize:
    """The size of one rank's ``chunk``."""
    model = language_model(chunk)
    head = output_layer(chunk)
    rows = getattr(head, "output_size_per_partition", 0)
    if rows == 0 and (part := embedding_part(chunk)) is not None:  # which is the output layer's too
        rows = part.num_embeddings_per_partition
    wrapped: Any = chunk
    while (inner := _first_within(wrapped, ("module",))) is not None:
        wrapped = inner
    parameters = _elements(chunk.parameters())
    known = () if model is None else model.parameters()
    layers = () if model is None else model.decoder.parameters()
    return ChunkSize(
        model=type(wrapped).__name__,
        layers=None if model is None else len(model.decoder.layers),
        rows=rows,
        parameters=parameters,
        beside=parameters - _elements(known),
        symbols="".join(getattr(getattr(model, "decoder", None), "layer_type_list", "")),
        head_is_looked_up=head_is_looked_up(chunk),
        trained_matrices=_trained(weight for weight in layers if weight.dim() > 1),
        reached=_reached(chunk, model),
        head_is_trained=head is None or _trained(head.parameters()) > 0,
        unkept=frozenset() if model is None else _unkept(model.decoder),
        settings=_settings(model),
    )


def _first_within(model: Any, names: Sequence[str]) -> Any | None:
    modules = (getattr(model, name, None) for name in names)
    return next((module for module in modules if isinstance(module, torch.nn.Module)), None)


def _reached(chunk: torch.nn.Module, model: Any | None) -> float:
    layers = [] if model is None else list(model.decoder.layers)
    of_layers = {weight for layer in layers for weight in layer.parameters()}
    if any(weight.requires_grad for weight in chunk.parameters() if weight not in of_layers):
        return 1.0  # an embedding, or a tower; what comes after the layers is on another stage
    trained = [_trained(layer.parameters()) > 0 for layer in layers]
    return (len(layers) - trained.index(True)) / len(layers) if any(trained) else 0.0


def _unkept(layers: torch.nn.Module) -> frozenset[str]:
    """Of `_MATRICES`, those that are frozen in all ``layers``, with nothing trained beside them: an
    adapter is within what stands in the place of its matrix, and takes the same input."""
    kept: dict[str, bool] = {}
    for path, module in layers.named_modules():
        name = path.rpartition(".")[2]
        if name in _MATRICES:
            trained = any(w.requires_grad and w.dim() > 1 for w in module.parameters())
            kept[name] = kept.get(name, False) or trained
    return frozenset(name for name, is_kept in kept.items() if not is_kept)


def _settings(model: Any) -> tuple[tuple[str, object], ...]:
    names = {
        "position_embedding_type": "position_embedding_type",
        "max_sequence_length": "max_position_embeddings",
    }
    told = [(names[name], getattr(model, name)) for name in names if hasattr(model, name)]
    is_tied = getattr(model, "share_embeddings_and_output_weights", None)
    if is_tied is not None:
        told.append(("untie_embeddings_and_output_weights", not is_tied))
    return tuple(told)


def _elements(weights: Iterable[Tensor]) -> int:
    return sum(weight.numel() for weight in weights)


def _trained(weights: Iterable[Tensor]) -> float:
    """How much of ``weights`` is trained, from 0 to 1. (1 where there are none.)"""
    weights = list(weights)
    trained = _elements(weight for weight in weights if weight.requires_grad)
    return trained / _elements(weights) if weights else 1.0
