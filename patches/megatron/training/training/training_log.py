"""Log of an iteration, delivered after the post-validation of its optimizer step.

`training_log`, in megatron/training/training.py, counts skipped iterations, sums losses, and prints
at intervals. Megatron calls it first after a step, so commit points are handled here. Commit points
are iterations after which Megatron evaluates, saves or exits.

A log deferred into the next step still finds the consumed samples, the batch size and the losses of
its own iteration: Megatron's train changes them only after that next step, and an iteration before
the number of microbatches changes is a commit point. Only memory statistics
(``log_memory_to_tensorboard``) are those at the beginning of the next step.

Not patched: what is logged, and train.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.training.global_vars import get_args

from megatron_ext.config import PipelineConfig
from megatron_ext.features.post_validation.adapter.commit_points import (
    is_commit_point,
    microbatches_will_change,
)
from megatron_ext.features.post_validation.adapter.pending import Result, post_validation
from megatron_ext.patches.engine import Patch, expect, wrap
from megatron_ext.patches.megatron.training.utils.common_utils import in_single_precision

_TRAINING = "megatron.training.training"


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch that logs an iteration after the post-validation of its optimizer step."""
    return (
        wrap(
            f"{_TRAINING}:training_log",
            log_after_the_verdict,
            reason="gradient norm and success of a step are known only after its post-validation",
            digests={
                "0.18": "5cc636c49dc2",
                "0.19": "3f173e2edc82",
                "0.20": "a2fbd9565b08",
                "0.20@2a75ac1": "8938438e4154",
            },
        ),
        *(
            expect(f"{_TRAINING}:{name}", reason=reason, digests=digests)
            for name, reason, digests in (
                (
                    "train",
                    "waits for other ranks, and reads what a step has changed, where it is known",
                    {
                        "0.18": "6d91c0e7e80e",
                        "0.19": "9e43582d2bcc",
                        "0.20": "032433ebb34a",
                        "0.20@2a75ac1": "014cd9b59f0c",
                    },
                ),
                (
                    "train_step",
                    "waits for other ranks, and reads what a step has changed, where it is known",
                    {
                        "0.18": "15e1f43d7aa9",
                        "0.19": "74b4850ce71a",
                        "0.20": "3189dbf5934d",
                        "0.20@2a75ac1": "23344f0f37d9",
                    },
                ),
                (
                    "post_training_step_callbacks",
                    "acts at known intervals",
                    {"0.18": "017fda51c14c", "0.19": "ac14b53d7374", "0.20": "5843d92a4c53"},
                ),
                (
                    "checkpoint_and_decide_exit",
                    "acts at known intervals",
                    {"0.18, 0.19, 0.20": "7509d573b15b"},
                ),
            )
        ),
    )


class DeferredLog:
    """Call of Megatron's training_log, deferred until its optimizer step is post-validated.

    ``report_memory_flag`` is the call's result, or before the call its argument.
    """

    def __init__(self, original: Callable[..., bool], optimizer: Any, *args: Any, **kwargs: Any):
        self._original = original
        self._optimizer = optimizer
        self._call = inspect.signature(original).bind(*args, **kwargs)
        self.iteration: int = self._call.arguments["iteration"]
        self.report_memory_flag: bool = self._call.arguments["report_memory_flag"]

    def __call__(self, result: Result) -> None:
        """Log the iteration with the success, gradient norm and count of zeros that ``result`` has.

        If the step was redone, learning rate and loss scale are logged as they are now.
        """
        arguments = self._call.arguments
        arguments["skipped_iter"] = 0 if result.success else 1
        arguments["grad_norm"] = in_single_precision(result.grad_norm)
        arguments["num_zeros_in_grad"] = result.num_zeros
        if result.is_redone:
            groups = self._optimizer.param_groups
            arguments["learning_rate"] = get_canonical_lr_for_logging(groups)
            arguments["loss_scale"] = self._optimizer.get_loss_scale().item()
        self.report_memory_flag = self._original(*self._call.args, **self._call.kwargs)


def log_after_the_verdict(original: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
    """Run ``original``, which logs an iteration, once its optimizer step is post-validated.

    A pending step is post-validated now if the iteration evaluates, saves or exits, or if the
    number of microbatches changes next; otherwise the log is deferred. Without a pending step it is
    written now.
    """
    optimizer = post_validation.pending_optimizer
    if optimizer is None:
        return original(*args, **kwargs)
    log = DeferredLog(original, optimizer, *args, **kwargs)
    post_validation.log(log)
    megatron = get_args()
    if is_commit_point(log.iteration, megatron) or microbatches_will_change(megatron):
        post_validation.commit_or_rollback()
    return log.report_memory_flag
