"""Known parts of a model chunk: its language model and its output layer, if it has them.

A chunk is any module with set_input_tensor. A multimodal chunk wraps a language model; a chunk of a
caller's own class may have no known part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Attributes under which wrappers (DDP, mixed precision) and multimodal models of Megatron and
# Megatron-Bridge have the inner model.
_WITHIN = ("module", "language_model", "thinker")
_MATRICES = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@dataclass(frozen=True)
class ChunkSize:
    """Sizes of a model chunk (the part of the model on one stage), and which parts are trained.

    Attributes:
        model: the class of the model.
        layers: number of transformer layers; None if the chunk has no known language model.
        rows: rows of the output layer; 0 without an output layer.
        parameters: elements of all parameters.
        other_parameters: elements of the parameters outside the language model.
        symbols: layer symbols of a hybrid model, as in its pattern.
        head_is_looked_up: whether the output layer uses the embedding table of this stage.
        trained_matrices: trained share of the elements in the layers' matrices, from 0 to 1.
        reached: share of the layers, from 0 to 1, from the first trained layer on: they need
            gradients if nothing before the chunk is trained.
        head_is_trained: whether the output layer is trained; true without one.
        unkept: names of the layers' matrices that are frozen, so that their inputs are not saved.
        settings: Megatron's arguments that the language model knows and its TransformerConfig
            lacks.
    """

    model: str
    layers: int | None
    rows: int
    parameters: int
    other_parameters: int
    symbols: str = ""
    head_is_looked_up: bool = False
    trained_matrices: float = 1.0
    reached: float = 1.0
    head_is_trained: bool = True
    unkept: frozenset[str] = frozenset()
    settings: tuple[tuple[str, object], ...] = ()


def language_model(chunk: torch.nn.Module) -> Any | None:
    """Return the module in ``chunk`` that has Megatron's layers, such as a GPTModel.

    Return None without one. Wrappers (DDP, mixed precision, multimodal models) are removed.
    """
    model: Any = chunk
    while (inner := _first_within(model, _WITHIN)) is not None:
        model = inner
    return model if hasattr(getattr(model, "decoder", None), "layers") else None


def find_output_layer(chunk: torch.nn.Module) -> Any | None:
    """Return the output layer in ``chunk``, which computes the logits; None without one.

    It is found by its name in Megatron's models.
    """
    for name, module in (language_model(chunk) or chunk).named_modules():
        if name.rpartition(".")[2] == "output_layer":
            return module
    return None


def predicts_further(chunk: torch.nn.Module) -> bool:
    """Return whether ``chunk`` has the layers of multi-token prediction."""
    return getattr(language_model(chunk), "mtp_process", False)


def shifts_tokens(chunk: torch.nn.Module) -> bool:
    """Return whether ``chunk`` shifts tokens or labels by a position, for multi-token prediction.

    The chunk has the layers of multi-token prediction, or computes their losses.
    """
    model: Any = language_model(chunk)
    depths: int = getattr(getattr(model, "config", None), "mtp_num_layers", None) or 0
    return predicts_further(chunk) or (depths > 0 and model.post_process is True)


def head_is_looked_up(chunk: torch.nn.Module) -> bool:
    """Return whether the output layer of ``chunk`` uses the embedding table of the same stage.

    This is so with tied multi-token prediction. Autograd sums the gradients of both uses of the
    table, while a W pass would add the output layer's gradient separately; so the output layer has
    no W.
    """
    model = language_model(chunk)
    is_tied: bool = getattr(model, "share_embeddings_and_output_weights", False)
    return is_tied and predicts_further(chunk)


def unused_heads(chunks: Sequence[torch.nn.Module]) -> frozenset[Tensor]:
    """Return the unused weights of output layers that take the embedding table instead.

    They are parts of ``chunks``.
    """
    output_layers = [find_output_layer(chunk) for chunk in chunks if head_is_looked_up(chunk)]
    return frozenset(
        output_layer.weight for output_layer in output_layers if output_layer is not None
    )


def is_trained(chunk: torch.nn.Module) -> bool:
    """Return whether any parameter of ``chunk`` is trained."""
    return any(weight.requires_grad for weight in chunk.parameters())


def may_lose_gradients(chunk: torch.nn.Module) -> bool:
    """Return whether trained weights of ``chunk`` may get no gradient if its input requires none.

    Megatron's recompute (torch's reentrant checkpointing) then computes no gradients. For an
    unknown model the answer is true.
    """
    config = getattr(language_model(chunk), "config", None)
    return getattr(config, "recompute_granularity", "unknown") is not None


def chunk_size(chunk: torch.nn.Module) -> ChunkSize:
    """Return the sizes of one rank's ``chunk`` of the model."""
    model = language_model(chunk)
    output_layer = find_output_layer(chunk)
    rows = getattr(output_layer, "output_size_per_partition", 0)
    # If the chunk has no output layer, the number of vocabulary rows comes from the partitioned
    # embedding, which has as many.
    if rows == 0:
        rows = max(getattr(module, "output_rows", 0) for module in chunk.modules())
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
        other_parameters=parameters - _elements(known),
        symbols="".join(getattr(getattr(model, "decoder", None), "layer_type_list", "")),
        head_is_looked_up=head_is_looked_up(chunk),
        trained_matrices=_trained(weight for weight in layers if weight.dim() > 1),
        reached=_reached(chunk, model),
        head_is_trained=output_layer is None or _trained(output_layer.parameters()) > 0,
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
        # A trained weight outside the layers belongs to a part before them (embedding or vision
        # tower), since later parts are on another stage.
        return 1.0
    trained = [_trained(layer.parameters()) > 0 for layer in layers]
    return (len(layers) - trained.index(True)) / len(layers) if any(trained) else 0.0


def _unkept(layers: torch.nn.Module) -> frozenset[str]:
    """Return names in `_MATRICES` whose matrices are frozen and have no adapter in all ``layers``.

    A trained adapter is part of the module that replaces the matrix, and needs the same input.
    """
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
    settings = [(names[name], getattr(model, name)) for name in names if hasattr(model, name)]
    is_tied = getattr(model, "share_embeddings_and_output_weights", None)
    if is_tied is not None:
        settings.append(("untie_embeddings_and_output_weights", not is_tied))
    return tuple(settings)


def _elements(weights: Iterable[Tensor]) -> int:
    return sum(weight.numel() for weight in weights)


def _trained(weights: Iterable[Tensor]) -> float:
    """Return the trained share of the elements of ``weights``, from 0 to 1; 1 if there are none."""
    weights = list(weights)
    trained = _elements(weight for weight in weights if weight.requires_grad)
    return trained / _elements(weights) if weights else 1.0
