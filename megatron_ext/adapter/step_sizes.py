"""Numbers of microbatches that the steps of a training have.

With ``--step-batch-size-schedule`` the batch grows in the course of a training. Estimates for the
whole training use the step size with which most of its samples are trained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megatron.core.num_microbatches_calculator import (
    ConstantNumMicroBatchesCalculator,
    StepBatchsizeNumMicroBatchesCalculator,
)


@dataclass(frozen=True)
class StepSize:
    """Steps of a training that have the same number of microbatches.

    Attributes:
        batch: samples of a step, on all replicas.
        share: part of the training's samples that these steps have, from 0 to 1.
    """

    batch: int
    microbatches: int
    share: float


def count_microbatches(args: Any) -> int:
    """Return the number of microbatches of the first step of validated ``args``.

    Raises:
        ValueError: the batch cannot be split into microbatches; the text is Megatron's.
    """
    replicas, decreases = args.data_parallel_size, args.decrease_batch_size_if_needed
    kind, batch = ConstantNumMicroBatchesCalculator, {"global_batch_size": args.global_batch_size}
    if args.step_batch_size_schedule is not None:
        kind = StepBatchsizeNumMicroBatchesCalculator
        batch = {"schedule": args.step_batch_size_schedule, "seq_length": args.seq_length}
    try:
        calculator = kind(
            micro_batch_size=args.micro_batch_size,
            data_parallel_size=replicas,
            decrease_batch_size_if_needed=decreases,
            rank=1,  # with rank 0 Megatron's calculator would log
            **batch,
        )
    except AssertionError as error:
        raise ValueError(str(error)) from error
    return int(calculator.get())


def step_sizes(args: Any) -> list[StepSize]:
    """Return the step sizes of a training with validated ``args``, sorted by their samples.

    The size whose steps have most samples comes first.
    """
    samples: dict[int, float] = {}
    for batch, count in _samples_of_batches(args):
        samples[batch] = samples.get(batch, 0) + count
    total = sum(samples.values()) or 1
    at_once = args.micro_batch_size * args.data_parallel_size
    sizes = [StepSize(batch, batch // at_once, count / total) for batch, count in samples.items()]
    return sorted(sizes, key=lambda size: (-size.share, -size.batch))


def main_size(args: Any) -> StepSize:
    """Return the size of the steps that hold most samples of a training with validated ``args``."""
    return step_sizes(args)[0]


def evaluated_microbatches(args: Any) -> int | None:
    """Return the number of microbatches of an evaluation's steps; None without evaluations.

    ``args`` are Megatron's validated arguments.
    """
    if not (args.eval_iters or args.full_validation):
        return None
    at_once = args.eval_micro_batch_size * args.data_parallel_size
    microbatches: int = args.eval_global_batch_size // at_once
    return microbatches


def _samples_of_batches(args: Any) -> list[tuple[int, float]]:
    """Return (size of the global batch, number of samples trained with it) for each batch size."""
    if args.step_batch_size_schedule is None:
        return [(args.global_batch_size, 1)]
    parse = StepBatchsizeNumMicroBatchesCalculator._parse_schedule
    entries = parse(args.step_batch_size_schedule, args.seq_length)
    ends = [*(begin for begin, _ in entries[1:]), math.inf]
    trained, steps = 0, math.inf if args.train_iters is None else args.train_iters
    most = math.inf if args.train_samples is None else args.train_samples
    found: list[tuple[int, float]] = []
    for (_, batch), end in zip(entries, ends, strict=True):
        left = max(min(end, most) - trained, 0)
        taken = min(math.inf if left == math.inf else -(-left // batch), steps)
        # A training without an end in iterations or samples runs the last batch size for ever.
        if taken == math.inf:
            return [*((size, 0) for size, _ in found), (batch, 1)]
        found.append((batch, taken * batch))
        trained, steps = trained + taken * batch, steps - taken
    return found
