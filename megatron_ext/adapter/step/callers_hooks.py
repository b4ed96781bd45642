"""Hooks of the caller on a model, because of which some weight gradients cannot wait for W.

A hook may read or change a gradient in the middle of a backward pass. If that pass is split, the
gradient does not exist yet in I, and W runs no hooks. Weights that a hook depends on are therefore
not deferred, and the log says once which they are.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.nn.modules import module as module_hooks

from megatron_ext.base.logger import logger
from megatron_ext.base.words import counted
from megatron_ext.runtime.parameter_hooks import has_callers_hooks


@dataclass(frozen=True)
class CallersHooks:
    """Parameters of a rank, in one step, on which the caller's hooks depend.

    Attributes:
        parameters: parameters with hooks on their own gradients.
        of_modules: parameters within modules whose backward passes have hooks. In stock Megatron
            their gradients have been added when the hooks run.
    """

    parameters: frozenset[Tensor] = frozenset()
    of_modules: frozenset[Tensor] = frozenset()


def callers_hooks(models: Sequence[torch.nn.Module]) -> CallersHooks:
    """Return the parameters on which the caller's present hooks on ``models`` depend."""
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
    """Return whether torch has hooks on the backward passes of all modules of the process."""
    tables = module_hooks._global_backward_hooks, module_hooks._global_backward_pre_hooks
    return any(len(table) > 0 for table in tables)


def _has_backward_hooks(module: torch.nn.Module) -> bool:
    return len(module._backward_hooks) + len(module._backward_pre_hooks) > 0


def tell_of_hooks(models: Sequence[torch.nn.Module], hooks: CallersHooks) -> None:
    """Log once that some weights of ``models`` have no W pass, because ``hooks`` depend on them."""
    hooked = hooks.parameters | hooks.of_modules
    named = (item for model in models for item in model.named_parameters()) if hooked else ()
    weights = [name for name, parameter in named if parameter in hooked and parameter.dim() > 1]
    if weights:
        say_once(
            models[0],
            f"hooks on gradients run in I: W omits {counted(len(weights), 'weight')} of this "
            f"rank that they depend on, such as {weights[0]}",
        )


_said: weakref.WeakKeyDictionary[torch.nn.Module, set[int]] = weakref.WeakKeyDictionary()


def say_once(model: torch.nn.Module, text: str, level: int = logging.INFO) -> None:
    """Log ``text`` for ``model``, unless a text of the same ``level`` was logged for it before.

    Only one of the ranks that have the model logs it.
    """
    said = _said.setdefault(model, set())
    if level in said:
        return
    said.add(level)
    if parallel_state.model_parallel_is_initialized():
        ranks = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_data_parallel_rank(with_context_parallel=True),
        )
        if any(ranks):
            return
    logger.log(level, text)
