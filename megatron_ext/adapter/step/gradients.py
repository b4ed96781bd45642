"""Megatron's work on gradients around the passes: held back before them, and done after them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from megatron_ext.adapter.step.call import Call
from megatron_ext.adapter.step.model_stage import ModelStage, overlaps_reduction


@contextlib.contextmanager
def no_grad_sync(call: Call) -> Iterator[None]:
    """Hold back the reductions that backward hooks would start before W has run.

    If its caller gives no ``no_sync_func``, Megatron counts gradients instead; W's come without
    hooks.
    """
    given = call.config.no_sync_func
    functions = given if isinstance(given, list) else [given]
    if given is None:
        functions = [model.no_sync for model in call.models if overlaps_reduction(model)]
    with contextlib.ExitStack() as stack:
        for no_sync in functions:
            stack.enter_context(no_sync())
        yield


def tokens_of(call: Call, stages: Sequence[ModelStage]) -> torch.Tensor | None:
    """Return the number of tokens by which Megatron scales gradients after the passes; None if it
    does not."""
    if call.config.finalize_model_grads_func is None or not call.config.calculate_per_token_loss:
        return None
    return torch.stack([stage.tokens for stage in stages]).sum(dtype=torch.int)


def finalize_gradients(call: Call, tokens: torch.Tensor | None) -> None:
    """Finalize the gradients as Megatron does after the passes of a training step."""
    if call.config.finalize_model_grads_func is not None:
        call.config.finalize_model_grads_func(
            call.models,
            tokens,
            pg_collection=call.groups,
            force_all_reduce=call.force_all_reduce,
        )
