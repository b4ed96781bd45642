"""Slice of a sequence that the current pass runs, and the keys and values it attends to.

A slice attends to itself and to slices before it. Concatenating their keys and values for each
slice would make autograd save (k + 1) / 2 times as much for k slices. So each attention layer has
one buffer of the whole sequence: a slice writes its own part, and attends to, and saves, a view of
the buffer up to its end (`_Buffers`). The memory does not depend on k. With context parallelism
each rank has a contiguous part of every slice, and every rank's buffer has all of them.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

_Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Span:
    """Tokens from ``begin`` to ``end`` (exclusive) of a sequence of ``length`` tokens.

    The slice is split evenly over ``ranks`` context-parallel ranks; this one is number ``rank``.
    """

    begin: int
    end: int
    length: int
    rank: int = 0
    ranks: int = 1

    @property
    def local(self) -> Span:
        """Part of this slice that is on this context-parallel rank."""
        tokens = (self.end - self.begin) // self.ranks
        begin = self.begin + self.rank * tokens
        return Span(begin, begin + tokens, self.length)

    @property
    def here(self) -> slice:
        """Place of this slice's tokens among the tokens of the sequence that this rank has."""
        return slice(self.begin // self.ranks, self.end // self.ranks)


def spans(lengths: Sequence[int], rank: int = 0, ranks: int = 1) -> tuple[Span, ...]:
    """Return the slices with these ``lengths`` (tokens) into which a sequence is cut.

    Each length is a multiple of ``ranks``, the context-parallel ranks.
    """
    ends = list(itertools.accumulate(lengths, initial=0))
    pairs = itertools.pairwise(ends)
    return tuple(Span(begin, end, ends[-1], rank, ranks) for begin, end in pairs)


class RunningSlice:
    """Slice of a sequence that this process runs now, with the keys and values of all slices.

    Passes of a process run sequentially. ``span`` is a plain attribute, not thread-local: autograd
    runs recomputed forward passes on threads of its own.
    """

    def __init__(self) -> None:
        # Slice of a sequence that the current pass runs; None in a pass of a whole microbatch.
        self.span: Span | None = None
        self.spans: tuple[Span, ...] = ()  # all slices of a sequence in this step
        # Process group of the context-parallel ranks that share a sequence.
        self._ranks: dist.ProcessGroup | None = None
        self._microbatch: tuple[int, int] = (0, 0)  # stage and number of the running microbatch
        self._is_backward = False
        # Number of times that the running pass has used each key.
        self._uses: dict[Hashable, int] = {}
        self._kept: dict[tuple[int, int], dict[Hashable, Any]] = {}

    @contextlib.contextmanager
    def running(
        self, stage: int, microbatch: int, span: Span, *, is_backward: bool = False
    ) -> Iterator[None]:
        """Context in which a pass runs the slice ``span`` of ``microbatch`` on ``stage``."""
        assert self.span is None, "one pass at a time"
        self.span, self._microbatch = span, (stage, microbatch)
        self._is_backward = is_backward
        try:
            yield
        finally:
            self.span = None
            self._uses = {}  # the keys are layers, and would keep their model alive after the pass

    def attended(self, layer: Hashable, tensors: _Tensors, begin: int = 0) -> _Tensors:
        """Return keys and values that the running slice attends to in the attention ``layer``.

        They are those of all tokens from ``begin`` up to the slice's end.

        Args:
            tensors: the slice's own keys and values, tokens first. All slices have the same sizes
                in the other dimensions. With context parallelism each rank passes its own part, and
                gets everything before that part's end.
            begin: the first token that a token of the slice attends to.
        """
        span = self.span
        assert span is not None, "no slice runs"
        buffers = self.kept_of_use(layer, _Buffers)
        return _Attended.apply(buffers, span, begin, self._ranks, *tensors)

    def kept[Kept](self, key: Hashable, make: Callable[[], Kept]) -> Kept:
        """Return the value stored for ``key`` in the running slice's microbatch.

        The first slice of the microbatch makes the value with ``make``; it is stored until the
        microbatch's last pass.
        """
        of_microbatch = self._kept.setdefault(self._microbatch, {})
        if key not in of_microbatch:
            of_microbatch[key] = make()
        return of_microbatch[key]

    def kept_of_use[Kept](self, key: Hashable, make: Callable[[], Kept]) -> Kept:
        """Return a value as `kept` does, but one for each use of ``key`` in a pass.

        A pass may use a layer more than once. In a backward pass that recomputes layers, their uses
        come in reverse order.
        """
        before = self._uses.get(key, 0)
        self._uses[key] = before + 1
        in_all = self.kept((key, "uses"), _Count)
        if not self._is_backward:
            in_all.number = before + 1
        use = in_all.number - 1 - before if self._is_backward else before
        return self.kept((key, use), make)

    def drop(self, stage: int, microbatch: int) -> None:
        """Drop the values of ``microbatch`` on ``stage``, after its last pass."""
        self._kept.pop((stage, microbatch), None)

    @property
    def is_empty(self) -> bool:
        """Whether no value of any microbatch is stored."""
        return not self._kept

    @contextlib.contextmanager
    def step(self, spans: Sequence[Span], ranks: dist.ProcessGroup | None) -> Iterator[None]:
        """Context in which the passes of a step run in slices; nothing stays stored afterwards.

        Args:
            spans: the slices of the step's sequences; empty if microbatches are whole.
            ranks: group of context-parallel ranks that share sequences, if there is one.
        """
        self.spans, self._ranks = tuple(spans), ranks
        try:
            yield
            assert not self._kept, "something is left over of a microbatch's slices"
        finally:
            self.spans, self._ranks = (), None
            self.clear()

    def clear(self) -> None:
        """Drop the values of all microbatches, because the step restarts or ends."""
        self._kept.clear()


@dataclass
class _Count:
    number: int = 0


class _Buffers:
    """Keys and values of a whole sequence in one attention layer, and their gradients so far.

    In the backward pass the slices run in descending order. Each slice yields gradients of its own
    keys and values and of all earlier ones; gradients of earlier slices are summed in one buffer
    until those slices run. With context parallelism, keys and values of a slice are gathered into
    every rank's buffer, and a rank's part attends to everything up to its own end. The summed
    gradients of a slice are scattered back.
    """

    def __init__(self) -> None:
        self._full: _Tensors = ()
        self._gradients: _Tensors | None = None

    def write(
        self, span: Span, begin: int, tensors: _Tensors, ranks: dist.ProcessGroup | None
    ) -> _Tensors:
        """Write a slice's keys and values into the buffers.

        Return views from ``begin`` up to the slice's end. The views are made from ``data``, so that
        autograd does not take later writes beyond the slice for changes of saved tensors.
        """
        if not self._full:
            self._full = tuple(t.new_empty((span.length, *t.shape[1:])) for t in tensors)
        for full, local in zip(self._full, tensors, strict=True):
            part = full.data[span.begin : span.end]
            if span.ranks == 1:
                part[:] = local
            else:
                dist.all_gather_into_tensor(part, local.contiguous(), group=ranks)
        return tuple(full.data[begin : span.local.end] for full in self._full)

    def own_gradients(self, span: Span, begin: int, gradients: _Tensors) -> _Tensors:
        """Return the complete gradients of the slice's keys and values on this rank.

        ``gradients`` are those of everything from ``begin`` up to this rank's end.
        """
        summed = self._gradients
        if summed is None:  # the sequence's last slice, whose backward pass runs first
            if missing := span.end - span.local.end:
                gradients = tuple(_with_rows(gradient, after=missing) for gradient in gradients)
            first = span.begin - begin  # first row of the slice in ``gradients``
            local = tuple(gradient[first:] for gradient in gradients)
            self._gradients = tuple(_with_rows(g[:first], before=begin) for g in gradients)
        else:
            for before, gradient in zip(summed, gradients, strict=True):
                before[begin : span.local.end] += gradient
            local = tuple(before[span.begin : span.end] for before in summed)
        if span.begin == 0:
            self._full, self._gradients = (), None
        return local


class _Attended(torch.autograd.Function):
    """Autograd function that stores a slice's keys and values, and returns those up to its end."""

    @staticmethod
    def forward(
        ctx: Any,
        buffers: _Buffers,
        span: Span,
        begin: int,
        ranks: dist.ProcessGroup | None,
        *tensors: Tensor,
    ) -> _Tensors:
        ctx.buffers, ctx.span, ctx.begin, ctx.ranks = buffers, span, begin, ranks
        return buffers.write(span, begin, tensors, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        local = ctx.buffers.own_gradients(ctx.span, ctx.begin, gradients)
        if ctx.span.ranks > 1:
            local = tuple(_scattered(full, ctx.span.ranks, ctx.ranks) for full in local)
        return (None, None, None, None, *local)


def _with_rows(gradient: Tensor, before: int = 0, after: int = 0) -> Tensor:
    """Return ``gradient`` with zero rows around it, for tokens that nothing attends to."""
    return pad(gradient, (0, 0) * (gradient.dim() - 1) + (before, after))


def _scattered(full: Tensor, ranks: int, group: dist.ProcessGroup | None) -> Tensor:
    """Return this rank's part of ``full``, a slice's gradient, summed over the ``group``."""
    local = full.new_empty((len(full) // ranks, *full.shape[1:]))
    dist.reduce_scatter_tensor(local, full.contiguous(), group=group)
    return local


running_slice = RunningSlice()
