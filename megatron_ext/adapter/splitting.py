"""Which weight gradients of a rank wait for a W pass in a step, and which do not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from megatron_ext.runtime.weight_gradients import queue


@dataclass(frozen=True)
class Split:
    """What is split on one rank in one step.

    Attributes:
        waits: there are W passes.
        at_once: weights of layers that are split, and whose gradients yet do not wait for them.
        apart: weights that have passes of their own.
    """

    waits: bool
    at_once: frozenset[Tensor] = frozenset()
    apart: frozenset[Tensor] = frozenset()


def head_weights(models: Sequence[torch.nn.Module]) -> frozenset[Tensor]:
    """The weight that the output layer uses, on the rank that has it. (A pipeline's last stage has
    its own, tied or not.)"""
    model = get_attr_wrapped_model(models[-1], "decoder", return_model_obj=True)
    if head_is_looked_up(models[-1]):
        return frozenset([model.shared_embedding_or_output_weight()])
    weight = getattr(getattr(model, "output_layer", None), "weight", None)
    return frozenset() if weight is None else frozenset([weight])


def head_is_looked_up(chunk: torch.nn.Module) -> bool:
    """Whether the output layer of ``chunk`` uses the table of look-ups of the same stage: those of
    tied multi-token prediction.

    Autograd sums what both bring to its gradient. A W pass would add the output layer's apart.
    """
    model = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
    return getattr(model, "mtp_process", False) and model.share_embeddings_and_output_weights


def unused_heads(chunks: Sequence[torch.nn.Module]) -> frozenset[Tensor]:
    """The weights that Megatron gives output layers of ``chunks`` which use look-ups' tables."""
    return frozenset(
        get_attr_wrapped_model(chunk, "output_layer").weight
        for chunk in chunks
        if head_is_looked_up(chunk)
    )


@contextlib.contextmanager
def splitting(split: Split) -> Iterator[None]:
    """Within, split layers are told that W passes will come, if they will. Afterwards the queue is
    empty, also after an error."""
    queue.splitting = split.waits
    queue.at_once = split.at_once
    try:
        yield
        assert not len(queue), "weight gradients are left over after the step"
    finally:
        queue.clear()
