"""What Megatron's training loop keeps in its global variables, where it runs."""

from __future__ import annotations

import sys
from typing import Any

from megatron.core import num_microbatches_calculator

_PACKING = ("sft", "dataloader_inter_document_masking")  # since 0.19


def current_iteration() -> int | None:
    """The iteration as Megatron's log will count it; None where its training loop does not run."""
    iteration: int | None = getattr(training_global("_GLOBAL_ARGS"), "curr_iteration", None)
    return None if iteration is None else iteration + 1


def log_interval() -> int:
    """The interval, in iterations, at which Megatron writes to TensorBoard and W&B."""
    return getattr(training_global("_GLOBAL_ARGS"), "tensorboard_log_interval", 1)


def line_interval() -> int:
    """The interval, in iterations, at which Megatron prints its log line; 10 where its training
    loop does not run."""
    return getattr(training_global("_GLOBAL_ARGS"), "log_interval", 10)


def has_writers() -> bool:
    """Whether Megatron's last rank writes to TensorBoard or W&B; the same on all ranks."""
    return getattr(training_global("_GLOBAL_ARGS"), "tensorboard_dir", None) not in (None, "")


def packs_microbatches() -> bool:
    """Whether Megatron's scripts make one row of a microbatch, of several sequences each."""
    args = training_global("_GLOBAL_ARGS")
    return any(getattr(args, name, False) is True for name in _PACKING)


def restarts_in_process() -> bool:
    """Whether a failure of a rank has all of them train again in the same processes."""
    return getattr(training_global("_GLOBAL_ARGS"), "inprocess_restart", False) is True


def ramps_up_to(microbatches: int) -> bool:
    """Whether that is the number of microbatches which Megatron's batch size, as it grows, now
    asks for: many steps have each."""
    calculator = num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    constant = num_microbatches_calculator.ConstantNumMicroBatchesCalculator
    if calculator is None or isinstance(calculator, constant):
        return False
    return bool(calculator.get() == microbatches)


def training_global(name: str) -> Any:
    """A global variable of Megatron's training; None where that is not imported or initialised."""
    return getattr(sys.modules.get("megatron.training.global_vars"), name, None)
