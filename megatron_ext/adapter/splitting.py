"""Which weight gradients of a rank wait for a W pass in a step, and which do not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.adapter.model_parts import (
    head_is_looked_up,
    language_model,
    output_layer,
)
from megatron_ext.runtime.weight_gradients import Lent, is_owned, queue


@dataclass(frozen=True)
class Split:
    """What is split on one rank in one step.

    Attributes:
        waits: there are W passes.
        at_once: weights of layers that are split, and whose gradients yet do not wait for them.
        apart: weights that have passes of their own.
        is_lent: of a tensor, whether its memory is written to again before W.
    """

    waits: bool
    at_once: frozenset[Tensor] = frozenset()
    apart: frozenset[Tensor] = frozenset()
    is_lent: Lent = is_owned


def head_weights(models: Sequence[torch.nn.Module]) -> frozenset[Tensor]:
    """The weight that the output layer uses, on the rank that has it. (A pipeline's last stage has
    its own, tied or not.)"""
    model = language_model(models[-1])
    if model is not None and head_is_looked_up(models[-1]):
        weight = model.shared_embedding_or_output_weight()
    else:
        weight = getattr(output_layer(models[-1]), "weight", None)
    return frozenset() if weight is None else frozenset([weight])


@contextlib.contextmanager
def splitting(split: Split) -> Iterator[None]:
    """Within, split layers are told that W passes will come, if they will. Afterwards the queue is
    empty, also after an error."""
    queue.splitting = split.waits
    queue.at_once = split.at_once
    queue.is_lent = split.is_lent
    try:
        yield
        assert not len(queue), "weight gradients are left over after the step"
    finally:
        queue.clear()
