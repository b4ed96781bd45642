"""Weight gradients of a rank that wait for a W pass in a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.modules import module as module_hooks

from megatron_ext.adapter.model_parts import (
    head_is_looked_up,
    language_model,
    output_layer,
)
from megatron_ext.runtime.parameter_hooks import has_callers_hooks
from megatron_ext.runtime.weight_gradients import Lent, is_owned, queue


@dataclass(frozen=True)
class CallersHooks:
    """Parameters of a rank on which hooks of the caller's depend, in one step.

    Attributes:
        parameters: parameters with hooks on their own gradients.
        of_modules: parameters within modules whose backward passes have hooks. In stock's order the
            gradients have been added when these run.
    """

    parameters: frozenset[Tensor] = frozenset()
    of_modules: frozenset[Tensor] = frozenset()


@dataclass(frozen=True)
class Split:
    """Split of the backward pass on one rank in one step.

    Attributes:
        waits: whether there are W passes.
        hooks: the gradients of its parameters do not wait for W, since only I runs hooks.
        at_once: weights of split layers whose gradients nevertheless do not wait for W.
        apart: weights that have passes of their own.
        is_lent: tells whether a tensor's memory is overwritten before W.
    """

    waits: bool
    hooks: CallersHooks = CallersHooks()
    at_once: frozenset[Tensor] = frozenset()
    apart: frozenset[Tensor] = frozenset()
    is_lent: Lent = is_owned


def head_weights(models: Sequence[torch.nn.Module]) -> frozenset[Tensor]:
    """Return the weight that the output layer uses, on the rank that has it. (A pipeline's last
    stage has its own copy, tied or not.)"""
    model = language_model(models[-1])
    if model is not None and head_is_looked_up(models[-1]):
        weight = model.shared_embedding_or_output_weight()
    else:
        weight = getattr(output_layer(models[-1]), "weight", None)
    return frozenset() if weight is None else frozenset([weight])


def callers_hooks(models: Sequence[torch.nn.Module]) -> CallersHooks:
    """Return what the hooks that ``models`` have now depend on."""
    modules = [module for model in models for module in model.modules()]
    trained = {
        parameter
        for module in modules
        for parameter in module.parameters(recurse=False)
        if parameter.requires_grad
    }
    hooked = models if _runs_hooks_everywhere() else filter(_has_backward_hooks, modules)
    within = {parameter for module in hooked for parameter in module.parameters()}
    return CallersHooks(frozenset(filter(has_callers_hooks, trained)), frozenset(trained & within))


def _runs_hooks_everywhere() -> bool:
    """Whether torch runs hooks in the backward passes of all modules of the process."""
    tables = module_hooks._global_backward_hooks, module_hooks._global_backward_pre_hooks
    return any(len(table) > 0 for table in tables)


def _has_backward_hooks(module: torch.nn.Module) -> bool:
    return len(module._backward_hooks) + len(module._backward_pre_hooks) > 0


@contextlib.contextmanager
def splitting(split: Split) -> Iterator[None]:
    """Context in which split layers know whether W passes will follow. The queue is empty
    afterwards, even after an error."""
    queue.splitting = split.waits
    queue.at_once = split.at_once | split.hooks.parameters | split.hooks.of_modules
    queue.is_lent = split.is_lent
    try:
        yield
        assert not len(queue), "weight gradients are left over after the step"
    finally:
        queue.clear()
