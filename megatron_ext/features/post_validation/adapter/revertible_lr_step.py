"""Step of Megatron's learning-rate scheduler that can be reverted and repeated.

The scheduler steps only if the optimizer did, which is not known yet. So it steps as after a
success, and the state before that is stored until post-validation decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class RevertibleLrStep:
    """Step of Megatron's learning-rate scheduler that `take_back` reverts and `take` repeats.

    The constructor copies the scheduler's state before the step: the number of steps, and each
    parameter group's learning rate and weight decay. `take_back` restores these copies, so that no
    rounding can differ.

    Args:
        scheduler: Megatron's ``OptimizerParamScheduler``.
        step: advances ``scheduler`` by one training step, as Megatron does.
    """

    def __init__(self, scheduler: Any, step: Callable[[], None]) -> None:
        self._scheduler = scheduler
        self._step = step
        self._num_steps = scheduler.num_steps
        self._groups = [
            (group, _copy(group.get("lr")), group.get("weight_decay"))
            for group in scheduler.optimizer.param_groups
        ]

    def take(self) -> None:
        """Advance the learning rate by one step; `take_back` allows another call."""
        self._step()

    def take_back(self) -> None:
        """Restore the learning-rate scheduler's state before the step."""
        self._scheduler.num_steps = self._num_steps
        for group, learning_rate, weight_decay in self._groups:
            if isinstance(learning_rate, torch.Tensor):
                # The learning rate is copied in place, since the optimizer refers to this tensor.
                group["lr"].copy_(learning_rate)
            else:
                group["lr"] = learning_rate
            group["weight_decay"] = weight_decay


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
