"""First training step compared with Megatron's own function, in the same process.

If the user allows sources that our patches were not read against, nothing else tells whether a
patch still does what it should. So the first step runs three times on the same microbatches: twice
under Megatron's own function, whose two results tell how much kernels vary by themselves, and then
under our schedule, whose result counts.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexerLossLoggingHelper,
)
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.utils import log_single_rank
from torch import Tensor

from megatron_ext.adapter.layers import is_stock_placement
from megatron_ext.adapter.step.call import Call
from megatron_ext.adapter.training_globals import current_iteration, training_global
from megatron_ext.base.logger import logger
from megatron_ext.compile.registry import entries
from megatron_ext.config import ALLOW_UNKNOWN, PipelineConfig, flag
from megatron_ext.runtime.messages.peers import are_rehearsed
from megatron_ext.runtime.world import gather_from_all
from megatron_ext.schedule.problem import Offload, VocabularyParallel

# Accepted difference from Megatron's step, as a multiple of the difference between two runs of
# Megatron's step.
_VARIATION = 10


class FirstStep:
    """Runner of the first training step, which compares our schedule's results with Megatron's own.

    ``ours`` are our settings. ``stock`` is the function of Megatron that would run the step.
    """

    def __init__(self, ours: PipelineConfig) -> None:
        self._ours = ours
        self.stock: Callable[..., Any] | None = None
        self._is_over = not os.environ.get(ALLOW_UNKNOWN, "").strip()

    def run(
        self, call: Call, arguments: Mapping[str, Any], run: Callable[[Call], list[Any]]
    ) -> list[Any]:
        """Return the result of ``run`` for ``call``, after a comparison in the first training step.

        That step runs under Megatron's own schedule too, and results of both are compared. The
        comparison is collective over the world.

        Args:
            arguments: arguments for Megatron's own function.

        Raises:
            ValueError: losses or gradients differ.
        """
        if self._is_over or call.forward_only or self.stock is None:
            return run(call)
        self._is_over = True
        why = _why_not(self._ours, call)
        if why is not None:
            log_single_rank(
                logger,
                logging.WARNING,
                f"{ALLOW_UNKNOWN} is set, and the first step under {flag('schedule')} "
                f"{self._ours.schedule} is not compared with Megatron's own, since {why}: compare "
                "the numbers with megatron-ext parity",
            )
            return run(call)
        return _compared(self.stock, call, arguments, run)


def _why_not(ours: PipelineConfig, call: Call) -> str | None:
    """Return why the gradients of ``call`` cannot be compared with Megatron's; None if they can."""
    if are_rehearsed():
        return "a rank is rehearsed alone, and Megatron's own messages would bring it nothing"
    resolved, ranks = ours.resolved_spec, call.pipeline.size()
    placement = resolved.place(ranks)
    if not is_stock_placement(placement):
        return "the schedule has other stages on a rank than Megatron's own have"
    if resolved.spec.partition(":")[0] not in entries():
        return "a schedule of your own may add gradients in another order"
    group = getattr(call.config, "microbatch_group_size_per_vp_stage", None) or ranks
    is_run = ranks <= group <= call.num_microbatches and (
        call.num_microbatches % group == 0 or call.num_microbatches % group >= ranks
    )
    if placement.chunks > 1 and not is_run:
        return (
            f"Megatron's own does not run {call.num_microbatches} microbatches on {ranks} ranks in "
            f"groups of {group}"
        )
    if ours.options.vocab_parallel is not VocabularyParallel.NONE or ours.slices > 1:
        return "parts of a microbatch are added in another order"
    if ours.options.steps_overlap:
        return "a step may be taken back"
    if ours.recomputes or ours.options.activation_offload is not Offload.NONE:
        return (
            f"Megatron's own function would need the memory that {flag('recompute')} and copies on "
            f"the host spare"
        )
    return _why_not_repeatable(call)


def _why_not_repeatable(call: Call) -> str | None:
    """Return why ``call`` cannot be run several times with the same results; None if it can."""
    if (saved := _saved_now()) is not None:
        return f"--{saved.replace('_', '-')} {_arguments(saved)} would save its passes too"
    config = call.config
    for setting in ("fp8", "fp4", "overlap_moe_expert_parallel_comm"):
        if getattr(config, setting, None):
            return f"a step with {setting} leaves a state that the next one reads"
    if getattr(config, "cuda_graph_impl", "none") != "none":
        return "graphs are captured in the order of one schedule"
    if not all(hasattr(model, "zero_grad_buffer") for model in call.models):
        return "gradients are not in buffers of Megatron's DistributedDataParallel"
    return None


def _arguments(name: str) -> Any:
    """Return the argument ``name`` of Megatron's training; None for callers without arguments."""
    return getattr(training_global("_GLOBAL_ARGS"), name, None)


def _saved_now() -> str | None:
    """Return the name of Megatron's setting, an interval, by which it saves values of this step.

    An example is ``save_dgrads_interval``. None means that Megatron saves nothing of this step.
    """
    step = current_iteration() or 1
    for name in (
        "save_activations_interval",
        "save_dgrads_interval",
        "save_tokens_per_expert_interval",
    ):
        if (interval := _arguments(name)) and step % interval == 0:
            return name
    return None


def _compared(
    stock: Callable[..., Any],
    call: Call,
    arguments: Mapping[str, Any],
    run: Callable[[Call], list[Any]],
) -> list[Any]:
    iterators = [_Replayed(iterator) for iterator in call.iterators]
    given: Any = [None if replayed.is_empty else replayed for replayed in iterators]
    known = inspect.signature(stock).parameters
    arguments = {name: value for name, value in arguments.items() if name in known}
    # Megatron's function gets the caller's sizes, since `call` may have packed a microbatch into
    # one row.
    arguments |= {"seq_length": call.seq_length, "micro_batch_size": call.micro_batch_size}
    arguments["data_iterator"] = given if isinstance(arguments["data_iterator"], list) else given[0]
    state = _State(call.models)
    runs = []
    for _ in range(2):
        losses = stock(**arguments)
        results = _results(call.models, losses)
        runs.append({name: result.to("cpu", copy=True) for name, result in results})
        state.restore()
        for replayed in iterators:
            replayed.rewind()
    losses = run(replace(call, iterators=given))
    first, second = runs
    here = []
    for name, result in _results(call.models, losses):
        difference = _difference(result.cpu(), second.get(name))
        variation = _difference(first[name], second[name]) if name in second else 0.0
        if difference > _VARIATION * variation:
            here.append(f"{name} by {difference:.3g} (Megatron's own vary by {variation:.3g})")
    different = [line for lines in gather_from_all(here[:1]) for line in lines]
    if different:
        raise ValueError(
            f"{ALLOW_UNKNOWN} permits Megatron sources that the patches were not written for, and "
            "the first step differs from that of Megatron's own pipeline function: "
            f"{different[0]}; nothing was trained: drop {flag('schedule')}, or use a Megatron "
            "version that megatron-ext doctor knows"
        )
    log_single_rank(
        logger,
        logging.INFO,
        "the first step has the gradients and losses of Megatron's own function",
    )
    return losses


def _difference(a: Tensor, b: Tensor | None) -> float:
    """Return the largest difference of two tensors.

    It is infinity if ``b`` is missing or has another shape, or if only one of two values is finite.
    In fp16, gradients of the first steps overflow.
    """
    if b is None or a.shape != b.shape:
        return math.inf
    if not a.numel():
        return 0.0
    difference = (a.double() - b.double()).abs()
    difference.masked_fill_((a == b) | (a.isnan() & b.isnan()), 0.0)
    return float(difference.nan_to_num_(nan=math.inf, posinf=math.inf).max())


def _results(models: Sequence[torch.nn.Module], losses: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield names and values of the ``losses``, and of the gradients of a rank's ``models``."""
    for chunk, model in enumerate(models):
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                gradient: Any = weight
                yield f"the gradient of {name} of chunk {chunk}", gradient.main_grad
    for microbatch, loss in enumerate(losses):
        parts = loss.items() if isinstance(loss, dict) else [("loss", loss)]
        for name, part in parts:
            if isinstance(part, Tensor):
                yield f"{name} of microbatch {microbatch}", part.detach()


class _Replayed:
    """Data iterator whose microbatches can be read a second time, after `rewind`."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self._read: list[Any] = []
        self._next = 0

    @property
    def is_empty(self) -> bool:
        """Whether there is no iterator, because the stage reads no data."""
        return self._iterator is None

    def __iter__(self) -> _Replayed:
        return self

    def __next__(self) -> Any:
        if self._next == len(self._read):
            self._read.append(next(self._iterator))
        self._next += 1
        return copy.copy(self._read[self._next - 1])

    def rewind(self) -> None:
        self._next = 0


class _State:
    """State of models before a step: random states, and buffers such as counts of routers.

    Gradients are not part of it.
    """

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._models = models
        self._random = random._get_all_rng_states()
        self._buffers = [
            (buffer, buffer.clone()) for model in models for buffer in _wrapped(model).buffers()
        ]

    def restore(self) -> None:
        """Restore the state, zero the gradients, and drop values that Megatron would log."""
        on_host, on_device, tracked = self._random
        # A copy of the saved states is restored, since Megatron changes the dictionary in place.
        random._set_all_rng_states(on_host, on_device, dict(tracked))
        for buffer, value in self._buffers:
            buffer.copy_(value)
        for model in self._models:
            model.zero_grad_buffer()  # type: ignore[operator]  # DistributedDataParallel's
            for group in _bucket_groups(model):
                # The step is marked as a first batch. In a later batch Megatron would expect each
                # parameter to get as many gradients as in Megatron's own step.
                group.is_first_batch = True
        get_moe_metrics_tracker().clear()
        MTPLossLoggingHelper.tracker.clear()
        DSAIndexerLossLoggingHelper.tracker.clear()
        _forget_packed_lengths()


def _forget_packed_lengths() -> None:
    """Drop the lengths of packed sequences that Megatron's training adds up for its TFLOP/s."""
    counting: Any = sys.modules.get("megatron.training.training")
    if getattr(counting, "_seqlen_stats_active", False):
        counting._seqlen_stats_in_iteration.zero_()
        counting._seqlen_stats_active = False


def _bucket_groups(model: Any) -> list[Any]:
    return [*model.bucket_groups, *model.expert_parallel_bucket_groups]


def _wrapped(model: Any) -> torch.nn.Module:
    """Return the module in a DistributedDataParallel ``model``, whose buffers are the model's.

    The wrapper itself calls its gradient buffers ``buffers``.
    """
    module: torch.nn.Module = model.module
    return module
