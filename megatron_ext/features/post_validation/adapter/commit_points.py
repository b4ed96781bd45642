"""Iterations after which Megatron reads or saves state, so that post-validation must have ended.

They are taken from `train`, `training_log`, `post_training_step_callbacks` and
`checkpoint_and_decide_exit`. Actions of a single rank at an interval (garbage collection, the
profiler, ``train_sync_interval``) are not among them.

This module patches nothing. The patch of `training_log`, which Megatron's loop calls first after a
step, calls it.
"""

from __future__ import annotations

import copy
from typing import Any

from megatron.core import num_microbatches_calculator

INTERVALS = (
    "log_interval",
    "eval_interval",
    "save_interval",
    "non_persistent_save_interval",
    "exit_interval",
    "check_weight_hash_across_dp_replicas_interval",
    "gpu_sniff_test_interval",
)


def why_no_steps_overlap(args: Any) -> str | None:
    """Return why no two steps of a launch will overlap; None if some may.

    The reason is that every step is logged, and so post-validated, before the next step begins.
    """
    if args.log_interval != 1:
        return None
    return (
        "with --log-interval 1 every step is validated before the next one begins, and none "
        "overlap: write --log-interval 10, or more"
    )


def is_commit_point(iteration: int, args: Any) -> bool:
    """Return whether the optimizer step of ``iteration`` must be validated before the next step.

    ``iteration`` counts from 1; ``args`` are Megatron's. The iteration before a skipped one must be
    validated, too: data is read without a step there.
    """
    intervals = [getattr(args, name) for name in INTERVALS]
    if args.adlr_autoresume:
        intervals.append(args.adlr_autoresume_interval)
    return (
        any(interval and iteration % interval == 0 for interval in intervals)
        or iteration >= args.train_iters
        or iteration in (args.phase_transition_iterations or ())
        or iteration + 1 in (args.iterations_to_skip or ())
    )


def microbatches_will_change(args: Any) -> bool:
    """Return whether the next step has a different number of microbatches than this one.

    Megatron may then save a checkpoint, and it logs the current number.
    """
    now = num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    later = copy.copy(now)
    later.update(args.consumed_train_samples, consistency_check=False, verbose=False)
    return bool(later.get() != now.get())
