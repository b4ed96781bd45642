"""CUDA graphs without a GPU: a stand-in for Transformer Engine's `make_graphed_callables`.

A graphed callable runs its layer where a GPU would replay the graph, but keeps inputs and outputs
as Transformer Engine does, in buffers that are allocated once. The order of capture alone decides
which graph has which buffer. As soon as Transformer Engine would have returned a buffer to the pool
of all graphs, the next graph to run writes NaN to it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer import cuda_graphs
from torch import Tensor

from megatron_ext.runtime.weight_gradients import queue


class Pool:
    """The memory of all graphs that are captured together."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []
        self._returned: list[Tensor] = []
        # Number of a layer, and the gradients of its input.
        self._above: tuple[int, list[Tensor]] | None = None
        self._chunk_before: list[Tensor] = []

    def like(self, tensor: Tensor) -> Tensor:
        made = torch.empty_like(tensor, requires_grad=False)
        self.buffers.append(made)
        return made

    def ranges(self) -> list[tuple[int, int]]:
        return [(b.data_ptr(), b.data_ptr() + b.nbytes) for b in self.buffers]

    def begin(self) -> None:
        """Overwrite returned buffers before a graph runs."""
        for buffer in self._returned:
            buffer.fill_(float("nan") if buffer.is_floating_point() else 0)
        self._returned.clear()

    def ended_backward(self, layer: int, outputs: list[Tensor], gradients: list[Tensor]) -> None:
        """Return to the pool the buffers that a backward graph does not use any more.

        Its ``outputs`` go back now. The ``gradients`` that it wrote go back when the graph below it
        has run; those of the lowest layer of a chunk, when the lowest layer of the next chunk has
        run.
        """
        self._returned += outputs
        if self._above is not None and self._above[0] == layer + 1:
            self._returned += self._above[1]
        self._above = layer, gradients
        if layer == 0:
            self._returned += self._chunk_before
            self._chunk_before = gradients


pool = Pool()


def make_graphed_callables(
    callables: Sequence[Any],
    sample_args: Sequence[tuple[Tensor, ...]],
    *,
    _order: Sequence[int],
    _num_layers_per_chunk: Sequence[int],
    sample_kwargs: Sequence[dict[str, Any]] | None = None,
    **others: Any,
) -> tuple[Graph, ...]:
    """Stand in for Transformer Engine's function, and compute in the same way which callable has
    which number and which input buffers."""
    microbatches = len(_order) // len(_num_layers_per_chunk) // 2
    begins = [sum(_num_layers_per_chunk[:c]) for c in range(len(_num_layers_per_chunk))]
    inputs = [*sample_args]
    kwargs = [{} for _ in inputs] if sample_kwargs is None else [*sample_kwargs]
    waiting: dict[int, deque[int]] = defaultdict(deque)
    consumed: dict[Any, deque[int]] = defaultdict(deque)
    forwards: dict[int, int] = defaultdict(int)
    graphs: dict[int, Graph] = {}
    for entry in _order:
        chunk = abs(entry) - 1
        layers = _num_layers_per_chunk[chunk]
        if entry < 0:
            for _ in range(layers):
                index = waiting[chunk].popleft()
                consumed[_signature(inputs[index], kwargs[index])].append(index)
            continue
        for layer in range(layers):
            index = begins[chunk] * microbatches + forwards[chunk] * layers + layer
            free = consumed[_signature(inputs[index], kwargs[index])]
            if free:
                other = free.popleft()
                inputs[index], kwargs[index] = inputs[other], kwargs[other]
            waiting[chunk].append(index)
            module = callables[begins[chunk] + layer]
            graphs[index] = Graph(module, layer, inputs[index], kwargs[index])
        forwards[chunk] += 1
    assert sorted(graphs) == list(range(len(inputs)))
    return tuple(graphs[index] for index in range(len(inputs)))


def _signature(args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Any:
    return tuple((t.shape, t.dtype) for t in (*args, *kwargs.values()))


class Graph:
    """The two graphs of a layer for one microbatch."""

    def __init__(
        self, module: Any, layer: int, inputs: tuple[Tensor, ...], kwargs: dict[str, Any]
    ) -> None:
        self._run = getattr(module, "_te_cuda_graph_capture", module)
        self.layer = layer
        self._inputs, self._kwargs = inputs, kwargs
        outputs = self._forward()
        self.outputs = [pool.like(output) for output in outputs]
        self.differentiable = [output.requires_grad for output in outputs]
        parameters = [p for p in module.parameters() if p.requires_grad]
        ones = [torch.ones_like(output) for output in outputs if output.requires_grad]
        leaves = [x for x in inputs if x.requires_grad]
        made = torch.autograd.grad(
            [output for output in outputs if output.requires_grad],
            [*leaves, *parameters],
            ones,
            allow_unused=True,
        )
        self.gradients = [pool.like(gradient) for gradient in made[: len(leaves)]]
        self._parameters = [
            p for p, g in zip(parameters, made[len(leaves) :], strict=True) if g is not None
        ]
        self.made: list[Tensor] = []

    def __call__(self, *args: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
        with torch.no_grad():
            for name, buffer in self._kwargs.items():
                # For a layer without a mask Megatron passes a mask of zeros, as the layer's
                # attention is causal anyway. The zeros are not copied: the buffer keeps the
                # samples' mask, which is causal.
                if name != "attention_mask" or kwargs[name].any():
                    buffer.copy_(kwargs[name])
        result: tuple[Tensor, ...] = _Replayed.apply(self, *args, *self._parameters)
        return result

    def reset(self) -> None:
        self.outputs.clear()

    def _forward(self) -> list[Tensor]:
        # While this flag is set, Megatron's layers run only the modules that a graph captures.
        splits, queue.splitting = queue.splitting, False
        captures, cuda_graphs._IS_GRAPH_CAPTURING = cuda_graphs._IS_GRAPH_CAPTURING, True
        try:
            with torch.enable_grad():
                outputs = self._run(*self._inputs, **self._kwargs)
        finally:
            queue.splitting = splits
            cuda_graphs._IS_GRAPH_CAPTURING = captures
        return [outputs] if isinstance(outputs, Tensor) else [*outputs]

    def forward(self, args: Sequence[Tensor]) -> list[Tensor]:
        pool.begin()
        with torch.no_grad():
            for buffer, x in zip(self._inputs, args, strict=False):
                buffer.copy_(x)
        self.made = self._forward()
        for buffer, output in zip(self.outputs, self.made, strict=True):
            buffer.copy_(output.detach())
        return [buffer.detach() for buffer in self.outputs]

    def backward(self, gradients: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        pool.begin()
        pairs = [
            (output, gradient)
            for output, gradient in zip(self.made, gradients, strict=True)
            if output.requires_grad
        ]
        leaves = [x for x in self._inputs if x.requires_grad]
        made = torch.autograd.grad(
            [output for output, _ in pairs],
            [*leaves, *self._parameters],
            [gradient for _, gradient in pairs],
        )
        self.made = []
        for buffer, gradient in zip(self.gradients, made[: len(leaves)], strict=True):
            buffer.copy_(gradient)
        pool.ended_backward(self.layer, self.outputs, self.gradients)
        return (
            *(buffer.detach() for buffer in self.gradients),
            *(gradient.clone() for gradient in made[len(leaves) :]),
        )


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: Graph, *args: Tensor) -> tuple[Tensor, ...]:
        ctx.graph = graph
        outputs = graph.forward(args)
        fixed = [o for o, is_free in zip(outputs, graph.differentiable, strict=True) if not is_free]
        ctx.mark_non_differentiable(*fixed)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.graph.backward(gradients)
