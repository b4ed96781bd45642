"""Megatron's work on gradients around the passes of a step.

Data-parallel hooks start to reduce a gradient when a backward pass has computed it. With W deferred
that would be too soon, so reductions are held back until the passes are over. Then Megatron's own
functions finish the gradients, with its own counts of tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron_ext.adapter.step.call import Call
from megatron_ext.adapter.step.model_stage import ModelStage, overlaps_reduction


@contextlib.contextmanager
def no_grad_sync(call: Call) -> Iterator[None]:
    """Hold back, in this context, the gradient reductions that backward hooks would start before W.

    If the caller gives no ``no_sync_func``, Megatron would start a reduction after counting
    gradients, and W adds gradients without hooks.
    """
    given = call.config.no_sync_func
    functions = given if isinstance(given, list) else [given]
    _refuse_reduction_by_hooks(call, functions)
    if given is None:
        functions = [model.no_sync for model in call.models if overlaps_reduction(model)]
    with contextlib.ExitStack() as stack:
        for no_sync in functions:
            stack.enter_context(no_sync())
        yield


def _refuse_reduction_by_hooks(call: Call, no_sync_functions: Sequence[Any]) -> None:
    """Raise ValueError if hooks of wrappers other than Megatron's reduce gradients too early.

    Megatron's schedules leave ``no_sync_func`` before the last microbatch's backward pass, whose
    hooks then reduce. W passes run no hooks; Megatron's own wrapper is told when they are done.
    """
    if call.forward_only or call.config.grad_sync_func is not None:
        return
    if all(function in (None, contextlib.nullcontext) for function in no_sync_functions):
        return
    if not all(hasattr(model, "ddp_config") for model in call.models):
        raise ValueError(
            "config.no_sync_func holds back gradient reductions of a wrapper that is not "
            "Megatron's DistributedDataParallel. The wrapper's hooks would reduce in the last "
            "backward pass, and our schedules compute weight gradients after that: set "
            "config.grad_sync_func to a function that reduces the gradients of the parameters it "
            "is given, or reduce them in config.finalize_model_grads_func and set no "
            "config.no_sync_func"
        )


def token_count(call: Call, stages: Sequence[ModelStage]) -> torch.Tensor | None:
    """Return the number of tokens by which Megatron scales gradients.

    Return None if it does not scale them.
    """
    if call.config.finalize_model_grads_func is None or not call.config.calculate_per_token_loss:
        return None
    return torch.stack([stage.tokens for stage in stages]).sum(dtype=torch.int)


def finalize_gradients(call: Call, tokens: torch.Tensor | None) -> None:
    """Finalize the gradients as Megatron does after the passes of a training step.

    The caller's ``grad_sync_func`` is called first, for chunks whose reduction Megatron does not
    overlap.
    """
    given = call.config.grad_sync_func
    functions = given if isinstance(given, list) else [given] * len(call.models)
    for model, reduce in zip(call.models, functions, strict=True):
        if reduce is not None and not overlaps_reduction(model):
            reduce(model.parameters())
    if call.config.finalize_model_grads_func is not None:
        call.config.finalize_model_grads_func(
            call.models,
            tokens,
            pg_collection=call.groups,
            force_all_reduce=call.force_all_reduce,
        )
