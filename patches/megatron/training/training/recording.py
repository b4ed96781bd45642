"""Recording of a training, for comparison with another: `megatron-ext parity`.

Three functions that pretrain and train call by name are patched: the one that sets up the model,
the one that logs a step, and the one that decides whether to go on. None of them takes part in a
step's computation.

With reversed microbatches, train_step gets a schedule function that reads them backwards.

Not patched: train, and all computation.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from megatron.training import training
from megatron.training.global_vars import get_args

from megatron_ext.adapter.parity.result_recorder import ParityRecorder, give_up
from megatron_ext.adapter.step.ordered_calls import reversed_microbatches
from megatron_ext.patches.engine import Patch, wrap

_TRAINING = "megatron.training.training"


def patches(recorder: ParityRecorder) -> tuple[Patch, ...]:
    """Return the patches through which ``recorder`` records losses and tensors of a training."""

    def set_up(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        model, optimizer, *_ = made
        _or_give_up(recorder.begin, model, optimizer, get_args())
        return made

    def log(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        _or_give_up(
            recorder.iteration,
            given["iteration"],
            given["loss_dict"],
            given["grad_norm"],
            given["skipped_iter"],
        )
        return original(*args, **kwargs)

    def end(original: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        if recorder.is_last(given["iteration"]):
            _gather_parameters(given["model"], given["optimizer"])
            _or_give_up(recorder.end)
        return original(*args, **kwargs)

    return (
        wrap(
            f"{_TRAINING}:setup_model_and_optimizer",
            set_up,
            reason="parity records the tensors that a training starts from",
        ),
        wrap(
            f"{_TRAINING}:training_log",
            log,
            reason="parity records losses, norms and digests of tensors",
        ),
        wrap(
            f"{_TRAINING}:checkpoint_and_decide_exit",
            end,
            reason="parity records the tensors after the last iteration",
        ),
    )


def reversing_patches() -> tuple[Patch, ...]:
    """Return the patch by which each training step runs its microbatches in reverse order."""

    def step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(original).bind(*args, **kwargs)
        forward_backward = bound.arguments["forward_backward_func"]
        bound.arguments["forward_backward_func"] = reversed_microbatches(forward_backward)
        return original(*bound.args, **bound.kwargs)

    return (
        wrap(
            f"{_TRAINING}:train_step",
            step,
            reason="parity record --reversed adds microbatches in reverse order",
        ),
    )


def _gather_parameters(model: Any, optimizer: Any) -> None:
    """Gather the distributed optimizer's parameters now, if Megatron defers that to the next step.

    Megatron 0.18 does not use ``optimizer``.
    """
    if training.should_disable_forward_pre_hook(get_args()):
        takes = inspect.signature(training.force_param_sync).parameters
        known = {"optimizer": optimizer} if "optimizer" in takes else {}
        training.force_param_sync(model, **known)


def _or_give_up(act: Callable[..., None], *args: Any) -> None:
    try:
        act(*args)
    except ValueError as error:
        give_up(error)
