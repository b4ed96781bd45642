"""Callers whose passes Megatron can turn into schedule plans.

A schedule plan is a forward pass in separate parts, so Megatron has plans only for some models, and
a caller has to make it on request (``return_schedule_plan``). A model without plans is refused. A
caller that makes no plans still trains: a log line says once that its passes do not overlap.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model, log_single_rank

from megatron_ext.adapter.pairs.overlap_setting import FLAG
from megatron_ext.adapter.step.call import Call
from megatron_ext.base.logger import logger

_WORD = "return_schedule_plan"


def takes_plans(forward_step_func: Callable[..., Any]) -> bool:
    """Return whether ``forward_step_func`` can return a Megatron schedule plan.

    Overlapped passes require one. If not, a warning is logged once, and passes that should overlap
    run sequentially.
    """
    parameters = inspect.signature(forward_step_func).parameters
    if _WORD in parameters or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    ):
        return True
    _say_that_nothing_hides(getattr(forward_step_func, "__qualname__", "forward_step_func"))
    return False


@functools.cache
def _say_that_nothing_hides(name: str) -> None:
    log_single_rank(
        logger,
        logging.WARNING,
        f"{FLAG} hides nothing: {name} takes no {_WORD}, so all passes run whole and "
        f"sequentially. Let it return model.build_schedule_plan(...) if {_WORD} is true, as the "
        f"forward step of pretrain_gpt.py does",
    )


def refuse_unplanned(call: Call) -> None:
    """Raise ValueError if passes of ``call`` cannot overlap, for lack of Megatron schedule plans.

    The reason is the model, its frozen parameters, or a caller's own process groups.
    """
    if not parallel_state.model_parallel_is_initialized():
        raise ValueError(
            f"{FLAG}: the caller has process groups of its own, and Megatron finds the rank with "
            f"the loss by its global groups; call initialize_model_parallel, or drop {FLAG}"
        )
    for model in call.models:
        try:
            get_attr_wrapped_model(model, "build_schedule_plan")
        except RuntimeError:
            raise ValueError(
                f"{FLAG} needs a model with the method build_schedule_plan, such as GPTModel, and "
                f"this model is a {type(model).__name__}: drop {FLAG}"
            ) from None
        frozen = [name for name, weight in model.named_parameters() if not weight.requires_grad]
        if frozen:
            raise ValueError(
                f"{FLAG} does not go with frozen parameters, such as {frozen[0]}: each part of a "
                f"model's schedule plan needs a gradient from the next part; drop {FLAG}"
            )
