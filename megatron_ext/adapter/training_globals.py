"""Global variables of Megatron's training loop, where it runs.

Megatron's loop has its arguments, its iteration and its writers in global variables, and other
callers of Megatron have none of them. Each function here reads some of them, and has a result for
callers without that loop.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from megatron.core import num_microbatches_calculator

# Arguments of Megatron 0.19 and later with which a microbatch is packed.
_PACKING = ("sft", "dataloader_inter_document_masking")


def current_iteration() -> int | None:
    """Return the iteration as Megatron's log counts it.

    Return None if Megatron's training loop does not run.
    """
    iteration: int | None = getattr(training_global("_GLOBAL_ARGS"), "curr_iteration", None)
    return None if iteration is None else iteration + 1


def log_interval() -> int:
    """Return the interval, in iterations, at which Megatron writes to TensorBoard and W&B."""
    return getattr(training_global("_GLOBAL_ARGS"), "tensorboard_log_interval", 1)


def line_interval() -> int:
    """Return the interval, in iterations, of Megatron's log line; 10 without its training loop."""
    return getattr(training_global("_GLOBAL_ARGS"), "log_interval", 10)


def has_writers() -> bool:
    """Return whether Megatron's last rank writes to TensorBoard or W&B; equal on all ranks."""
    return getattr(training_global("_GLOBAL_ARGS"), "tensorboard_dir", None) not in (None, "")


def packs_microbatches() -> bool:
    """Return whether Megatron's scripts pack the sequences of a microbatch into one row."""
    args = training_global("_GLOBAL_ARGS")
    return any(getattr(args, name, False) is True for name in _PACKING)


def restarts_in_process() -> bool:
    """Return whether ranks train anew in the same processes after a failure.

    The flag for that is --inprocess-restart.
    """
    return getattr(training_global("_GLOBAL_ARGS"), "inprocess_restart", False) is True


def ramps_up_to(microbatches: int) -> bool:
    """Return whether Megatron's growing batch size now has this number of microbatches.

    If so, many steps in a row will have the same number.
    """
    calculator = num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    constant = num_microbatches_calculator.ConstantNumMicroBatchesCalculator
    if calculator is None or isinstance(calculator, constant):
        return False
    return bool(calculator.get() == microbatches)


def checkpoint_folder(args: Any, name: str) -> Path | None:
    """Return the folder in which Megatron's ``args`` load or save checkpoints; None without one.

    ``name`` is ``load`` or ``save``. An address such as ``msc://bucket`` is no folder.
    """
    folder = getattr(args, name, None)
    return None if folder is None or "://" in str(folder) else Path(folder)


def training_global(name: str) -> Any:
    """Return a global variable of Megatron's training.

    Return None if there is no training in this process.
    """
    return getattr(sys.modules.get("megatron.training.global_vars"), name, None)
