"""Check that a model can be run slice by slice.

A module that mixes the tokens of a sequence must handle slices. One that does not would train
silently wrong, so a model is refused unless all such modules are known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp

from megatron_ext.adapter.slices.sparse_attention import knows_places
from megatron_ext.adapter.transformer_engine.installed import can_split

_DROP = "drop --pipeline-slices"
_OF_PREDICTION = "mtp_model_layer"  # name of the inner layer in a layer of multi-token prediction


def refuse_unknown(models: Sequence[torch.nn.Module]) -> None:
    """Raise ValueError unless each of ``models``, a rank's chunks, can be run slice by slice."""
    known = _known_attention()
    for chunk in models:
        model: Any = chunk
        while isinstance(inner := getattr(model, "module", None), torch.nn.Module):
            model = inner  # the model within a wrapper (DDP, mixed precision)
        if not isinstance(model, GPTModel) or type(model).forward is not GPTModel.forward:
            raise ValueError(
                f"--pipeline-slices requires a GPTModel, and in a {type(model).__name__} a token "
                f"may depend on others in ways that slices of sequences do not support: {_DROP}"
            )
        for layer in mixing_layers(model):
            if (unknown := unknown_mixer(layer, known)) is not None:
                raise ValueError(
                    f"--pipeline-slices does not go with {unknown}: tokens of a slice would not "
                    f"see those of the sequence's earlier slices; {_DROP}"
                )


def mixing_layers(model: GPTModel) -> list[Any]:
    """Return the transformer layers of ``model``, including those of multi-token prediction."""
    predicting = getattr(getattr(model, "mtp", None), "layers", ())
    return [*model.decoder.layers, *(getattr(layer, _OF_PREDICTION, None) for layer in predicting)]


def _known_attention() -> list[Callable[..., Any]]:
    known: list[Callable[..., Any]] = [DotProductAttention.forward]
    if can_split():
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        known.append(TEDotProductAttention.forward)
    if knows_places():
        from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention

        known.append(DSAttention.forward)
    return known


def unknown_mixer(layer: Any, known: Sequence[Callable[..., Any]]) -> str | None:
    """Return the class of the module that mixes tokens in ``layer``; None if it handles slices.

    ``known`` has the forward functions of attention modules that work on slices of a sequence.
    """
    for name in ("self_attention", "cross_attention"):
        attention = getattr(layer, name, None)
        if isinstance(attention, IdentityOp):
            continue
        core = getattr(attention, "core_attention", None)
        if core is None:
            return type(layer if attention is None else attention).__name__
        if type(core).forward not in known:
            return type(core).__name__
    return None
