"""Which slice of a sequence the pass that runs now is of, and what it attends to.

A slice attends to itself and to all before it. Were their keys and values concatenated anew for
each slice, and held by autograd, k slices would hold (k + 1) / 2 times as many. So each attention
layer has one buffer of a microbatch's whole sequence: a slice writes its own part, and attends to,
and saves, a view of the buffer up to its end. What is held does not depend on k.

In the backward pass the slices come in descending order. Each brings gradients of its own keys and
values and of those before it; the latter are summed in one buffer until their own slices come.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Span:
    """The tokens from ``begin`` to ``end``, exclusive, of a sequence of ``length``."""

    begin: int
    end: int
    length: int


def spans(lengths: Sequence[int]) -> tuple[Span, ...]:
    """Slices of ``lengths`` tokens, which are all of a sequence."""
    ends = list(itertools.accumulate(lengths, initial=0))
    return tuple(Span(begin, end, ends[-1]) for begin, end in itertools.pairwise(ends))


class RunningSlice:
    """Of one process, whose passes run one after the other.

    ``span`` is a plain attribute and not a thread's: autograd runs recomputed forward passes on
    threads of its own.
    """

    def __init__(self) -> None:
        self.span: Span | None = None  # None: a pass is of a whole microbatch
        self._microbatch: tuple[int, int] = (0, 0)  # stage, number
        self._kept: dict[tuple[int, int], dict[Hashable, Any]] = {}

    @contextlib.contextmanager
    def running(self, stage: int, microbatch: int, span: Span) -> Iterator[None]:
        """Around a pass of the slice ``span`` of ``microbatch``."""
        assert self.span is None, "one pass at a time"
        self.span, self._microbatch = span, (stage, microbatch)
        try:
            yield
        finally:
            self.span = None

    def attended(self, layer: Hashable, tensors: _Tensors) -> _Tensors:
        """What the running slice attends to in ``layer``: ``tensors`` of all slices up to it.

        Args:
            tensors: the slice's own keys and values, tokens first. Their sizes beside that are the
                same for all slices.
        """
        span = self.span
        assert span is not None, "no slice runs"
        buffers = self.kept(layer, _Buffers)
        attended: _Tensors = _Attended.apply(buffers, span, *tensors)
        return attended

    def kept[Kept](self, key: Hashable, make: Callable[[], Kept]) -> Kept:
        """What slices of the running one's microbatch have of ``key``, made by the first of them
        and kept until the last pass."""
        of_microbatch = self._kept.setdefault(self._microbatch, {})
        if key not in of_microbatch:
            of_microbatch[key] = make()
        kept: Kept = of_microbatch[key]
        return kept

    def drop(self, stage: int, microbatch: int) -> None:
        """After the last pass of ``microbatch``: hold nothing of it."""
        self._kept.pop((stage, microbatch), None)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held of any microbatch."""
        return not self._kept

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around the passes of a step. Afterwards nothing is held, also after an error."""
        try:
            yield
            assert not self._kept, "something is left over of a microbatch's slices"
        finally:
            self.clear()

    def clear(self) -> None:
        """Hold nothing: the step begins again."""
        self._kept.clear()


class _Buffers:
    """Of one layer and microbatch: keys and values of the whole sequence, and their gradients as
    far as they have come."""

    def __init__(self) -> None:
        self._whole: _Tensors = ()
        self._gradients: _Tensors | None = None

    def write(self, span: Span, tensors: _Tensors) -> _Tensors:
        """Write the slice's part. The views up to its end are not told of what is written beyond
        it: it would seem to autograd that what it has saved was changed."""
        if not self._whole:
            self._whole = tuple(t.new_empty((span.length, *t.shape[1:])) for t in tensors)
        for whole, own in zip(self._whole, tensors, strict=True):
            whole.data[span.begin : span.end] = own
        return tuple(whole.data[: span.end] for whole in self._whole)

    def own_gradients(self, span: Span, gradients: _Tensors) -> _Tensors:
        """The whole gradients of the slice's part; ``gradients`` are of all up to its end."""
        summed = self._gradients
        if summed is None:  # the last slice
            own = tuple(gradient[span.begin :] for gradient in gradients)
            self._gradients = tuple(gradient[: span.begin].clone() for gradient in gradients)
        else:
            for before, gradient in zip(summed, gradients, strict=True):
                before[: span.end] += gradient
            own = tuple(before[span.begin : span.end] for before in summed)
        if span.begin == 0:
            self._whole, self._gradients = (), None
        return own


class _Attended(torch.autograd.Function):
    """Writes a slice's keys and values, and gives all up to it."""

    @staticmethod
    def forward(ctx: Any, buffers: _Buffers, span: Span, *tensors: Tensor) -> _Tensors:
        ctx.buffers, ctx.span = buffers, span
        return buffers.write(span, tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.buffers.own_gradients(ctx.span, gradients))


running_slice = RunningSlice()
