"""Weight gradients of a rank that wait for a W pass in a step.

Layers split their backward pass only if a W will follow, and not all of their weights can wait for
it: a caller's hooks run in I alone, an output layer's gradient may take too much memory, and a CUDA
graph may overwrite the tensors. `Split` has these decisions for one step, and `splitting` passes
them to the queue of weight gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.adapter.model_parts import (
    find_output_layer,
    head_is_looked_up,
    language_model,
)
from megatron_ext.adapter.step.callers_hooks import CallersHooks, callers_hooks, tell_of_hooks
from megatron_ext.compile.output_layer import output_layer_waits
from megatron_ext.compile.program.verify import Program
from megatron_ext.runtime.weight_gradients import Lent, is_owned, queue


@dataclass(frozen=True)
class Split:
    """Weight gradients that wait for weight-gradient passes (W), in one step on one rank.

    Attributes:
        waits: whether the step has W passes.
        hooks: the caller's hooks; gradients of the parameters that they depend on do not wait for
            W, because only the input-gradient pass (I) runs hooks.
        at_once: further weights whose gradients are computed in I, although their layers are split.
        separate_weights: weights that have passes of their own.
        is_lent: tells whether a tensor's memory is overwritten before W.
    """

    waits: bool
    hooks: CallersHooks
    at_once: frozenset[Tensor] = frozenset()
    separate_weights: frozenset[Tensor] = frozenset()
    is_lent: Lent = is_owned


def split_of(
    models: Sequence[torch.nn.Module], program: Program, *, waits: bool, reads_hooks: bool
) -> Split:
    """Return the split of a step of ``program``, which features may change further.

    Args:
        waits: whether the step has W passes.
        reads_hooks: whether the caller's hooks on ``models`` matter.
    """
    hooks = callers_hooks(models) if reads_hooks else CallersHooks()
    if waits:
        tell_of_hooks(models, hooks)
    at_once = frozenset() if output_layer_waits(program) else _head_weights(models)
    return Split(waits, hooks, at_once)


def _head_weights(models: Sequence[torch.nn.Module]) -> frozenset[Tensor]:
    """Return the output layer's weight on the rank that has this layer; empty on other ranks.

    The last stage has its own copy of the weight, tied or not.
    """
    model = language_model(models[-1])
    if model is not None and head_is_looked_up(models[-1]):
        weight = model.shared_embedding_or_output_weight()
    else:
        weight = getattr(find_output_layer(models[-1]), "weight", None)
    return frozenset() if weight is None else frozenset([weight])


@contextlib.contextmanager
def splitting(split: Split) -> Iterator[None]:
    """Context in which layers split their backward pass by ``split`` if W passes follow.

    The queue of weight gradients is empty afterwards, even after an error.
    """
    queue.splitting = split.waits
    queue.at_once = split.at_once | split.hooks.parameters | split.hooks.of_modules
    queue.is_lent = split.is_lent
    try:
        yield
        assert not len(queue), "weight gradients are left over after the step"
    finally:
        queue.clear()
