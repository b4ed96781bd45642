"""Per-layer CUDA graphs of a rank (``--cuda-graph-impl transformer_engine``) during training.

Megatron captures them between two steps, one graph for each layer, microbatch and direction. They
share memory according to the order of capture, so every later step must run in exactly that order.
Outputs of graphs also lie in that memory: a later pass overwrites them, although a deferred weight
gradient or a message may still need them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron_ext.adapter.transformer_engine.capture_order import capture_order, check_capture
from megatron_ext.base.words import counted
from megatron_ext.runtime.weight_gradients import Lent, is_owned
from megatron_ext.schedule.action import Action


class LayerGraphs:
    """State of the per-layer CUDA graphs of this training: their order and their memory."""

    def __init__(self) -> None:
        self._order: list[int] | None = None  # capture order of the latest training step
        self._captured: list[int] | None = None
        self._memory: GraphMemory | None = None

    def begin(
        self,
        row: Sequence[Action],
        stages: Sequence[int],
        models: Iterable[torch.nn.Module],
    ) -> Lent:
        """Check the order of a step against that of the captured CUDA graphs, before it begins.

        The step runs ``row`` on ``models``, the chunks of ``stages``.

        Returns:
            A function that tells whether a tensor is in the memory of graphs.

        Raises:
            ValueError: graphs were captured in another order.
        """
        self._order = capture_order(row, stages)
        check_capture(self._order, row, stages)
        if self._captured is not None and not any(map(_has_graphs, models)):
            self._captured = self._memory = None  # Megatron has deleted the captured graphs
        if self._captured is None:
            return is_owned
        if self._order != self._captured:
            before, now = (_microbatches(order) for order in (self._captured, self._order))
            what = "another order of passes"
            if before != now:
                what = counted(now, "microbatch")
            raise ValueError(
                "--cuda-graph-impl transformer_engine has captured a step of "
                f"{counted(before, 'microbatch')}, and this step has {what}: give every step the "
                "same number of microbatches and the same schedule, or write --cuda-graph-impl "
                "none"
            )
        if self._memory is None:
            self._memory = GraphMemory(graph_memory())
        return self._memory.holds

    def order(self, chunks: int, microbatches: int) -> list[int]:
        """Return the order in which to capture CUDA graphs now: that of the latest training step.

        Only entries of the first ``chunks`` of this rank are returned. (A vision tower is in the
        first one.)

        Raises:
            ValueError: there has been no step, or it had another number of ``microbatches``.
        """
        if self._order is None:
            raise ValueError(
                "--cuda-graph-impl transformer_engine captures graphs in the order of the "
                "previous step's passes, and no step has run yet: write "
                "--cuda-graph-warmup-steps 1 or more"
            )
        before = _microbatches(self._order)
        if microbatches != before:
            raise ValueError(
                "--cuda-graph-impl transformer_engine is to capture a step of "
                f"{counted(microbatches, 'microbatch')}, and earlier steps had {before}: give "
                "every step the same number, or write --cuda-graph-impl none"
            )
        self._captured, self._memory = self._order, None
        return [entry for entry in self._order if abs(entry) <= chunks]

    def forget(self) -> None:
        """Drop the state of the CUDA graphs, because the training is over."""
        self._order = self._captured = self._memory = None


class GraphMemory:
    """Set of the memory ranges of CUDA graphs."""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Initialise the set from (first address, first address after the range) of each range."""
        self._ranges = sorted(ranges)
        self._starts = [start for start, _ in self._ranges]

    def holds(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` begins in one of the ranges.

        A quantised tensor has no memory of its own; it is created where it is used, in no graph.
        """
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            return False
        address = tensor.data_ptr()
        index = bisect_right(self._starts, address) - 1
        return index >= 0 and address < self._ranges[index][1]


def graph_memory() -> list[tuple[int, int]]:
    """Return the address ranges that torch reserves for CUDA graphs: its private pools."""
    return [
        (segment["address"], segment["address"] + segment["total_size"])
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) != (0, 0)
    ]


def _has_graphs(model: torch.nn.Module) -> bool:
    return any(getattr(module, "cuda_graphs", None) for module in model.modules())


def _microbatches(order: Sequence[int]) -> int:
    return order.count(1)


layer_graphs = LayerGraphs()
