"""Which slice of a sequence the pass that runs now is of, and what it attends to.

A slice attends to itself and to all before it. Were their keys and values concatenated anew for
each slice, and held by autograd, k slices would hold (k + 1) / 2 times as many. So each attention
layer has one buffer of a microbatch's whole sequence: a slice writes its own part, and attends to,
and saves, a view of the buffer up to its end. What is held does not depend on k.

In the backward pass the slices come in descending order. Each brings gradients of its own keys and
values and of those before it; the latter are summed in one buffer until their own slices come.

Where ranks share sequences (context parallelism), each has a part of every slice, tokens in a row.
Keys and values of a slice are gathered over them, into the buffer that each rank has; a rank's part
attends to all up to its own end. When the gradients of a slice are summed, they are scattered.
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
    """The tokens from ``begin`` to ``end``, exclusive, of a sequence of ``length``.

    ``ranks`` share each slice of it, as many tokens each; this one is number ``rank``.
    """

    begin: int
    end: int
    length: int
    rank: int = 0
    ranks: int = 1

    @property
    def own(self) -> Span:
        """This rank's part of it."""
        tokens = (self.end - self.begin) // self.ranks
        begin = self.begin + self.rank * tokens
        return Span(begin, begin + tokens, self.length)

    @property
    def here(self) -> slice:
        """Where its tokens are among those that this rank has of the sequence."""
        return slice(self.begin // self.ranks, self.end // self.ranks)


def spans(lengths: Sequence[int], rank: int = 0, ranks: int = 1) -> tuple[Span, ...]:
    """Slices of ``lengths`` tokens, multiples of ``ranks``, which are all of a sequence."""
    ends = list(itertools.accumulate(lengths, initial=0))
    pairs = itertools.pairwise(ends)
    return tuple(Span(begin, end, ends[-1], rank, ranks) for begin, end in pairs)


class RunningSlice:
    """Of one process, whose passes run one after the other.

    ``span`` is a plain attribute and not a thread's: autograd runs recomputed forward passes on
    threads of its own.
    """

    def __init__(self) -> None:
        self.span: Span | None = None  # None: a pass is of a whole microbatch
        self.spans: tuple[Span, ...] = ()  # of this step's sequences
        self._ranks: dist.ProcessGroup | None = None  # that share them
        self._microbatch: tuple[int, int] = (0, 0)  # stage, number
        self._is_backward = False
        self._uses: dict[Hashable, int] = {}  # of what is kept, by the running pass
        self._kept: dict[tuple[int, int], dict[Hashable, Any]] = {}

    @contextlib.contextmanager
    def running(
        self, stage: int, microbatch: int, span: Span, *, is_backward: bool = False
    ) -> Iterator[None]:
        """Around a pass of the slice ``span`` of ``microbatch``."""
        assert self.span is None, "one pass at a time"
        self.span, self._microbatch = span, (stage, microbatch)
        self._is_backward, self._uses = is_backward, {}
        try:
            yield
        finally:
            self.span = None

    def attended(self, layer: Hashable, tensors: _Tensors) -> _Tensors:
        """What the running slice attends to in ``layer``: ``tensors`` of all slices up to it.

        Args:
            tensors: the slice's own keys and values, tokens first. Their sizes beside that are the
                same for all slices. Of ranks that share sequences each gives its part, and gets
                what is before its end.
        """
        span = self.span
        assert span is not None, "no slice runs"
        buffers = self.kept_of_use(layer, _Buffers)
        attended: _Tensors = _Attended.apply(buffers, span, self._ranks, *tensors)
        return attended

    def kept[Kept](self, key: Hashable, make: Callable[[], Kept]) -> Kept:
        """What slices of the running one's microbatch have of ``key``, made by the first of them
        and kept until the last pass."""
        of_microbatch = self._kept.setdefault(self._microbatch, {})
        if key not in of_microbatch:
            of_microbatch[key] = make()
        kept: Kept = of_microbatch[key]
        return kept

    def kept_of_use[Kept](self, key: Hashable, make: Callable[[], Kept]) -> Kept:
        """As `kept`, of one use of ``key``: a pass may use a layer more than once. Layers that a
        backward pass runs again come in the reverse order."""
        before = self._uses.get(key, 0)
        self._uses[key] = before + 1
        in_all = self.kept((key, "uses"), _Count)
        if not self._is_backward:
            in_all.number = before + 1
        use = in_all.number - 1 - before if self._is_backward else before
        return self.kept((key, use), make)

    def drop(self, stage: int, microbatch: int) -> None:
        """After the last pass of ``microbatch``: hold nothing of it."""
        self._kept.pop((stage, microbatch), None)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held of any microbatch."""
        return not self._kept

    @contextlib.contextmanager
    def step(self, spans: Sequence[Span], ranks: dist.ProcessGroup | None) -> Iterator[None]:
        """Around the passes of a step. Afterwards nothing is held, also after an error.

        Args:
            spans: the slices of its sequences; none where microbatches are whole.
            ranks: that share sequences, if any do.
        """
        self.spans, self._ranks = tuple(spans), ranks
        try:
            yield
            assert not self._kept, "something is left over of a microbatch's slices"
        finally:
            self.spans, self._ranks = (), None
            self.clear()

    def clear(self) -> None:
        """Hold nothing: the step begins again."""
        self._kept.clear()


@dataclass
class _Count:
    number: int = 0


class _Buffers:
    """Of one layer and microbatch: keys and values of the whole sequence, and their gradients as
    far as they have come."""

    def __init__(self) -> None:
        self._whole: _Tensors = ()
        self._gradients: _Tensors | None = None

    def write(self, span: Span, tensors: _Tensors, ranks: dist.ProcessGroup | None) -> _Tensors:
        """Write the slice's part. The views up to its end are not told of what is written beyond
        it: it would seem to autograd that what it has saved was changed."""
        if not self._whole:
            self._whole = tuple(t.new_empty((span.length, *t.shape[1:])) for t in tensors)
        for whole, own in zip(self._whole, tensors, strict=True):
            part = whole.data[span.begin : span.end]
            if span.ranks == 1:
                part[:] = own
            else:
                dist.all_gather_into_tensor(part, own.contiguous(), group=ranks)
        return tuple(whole.data[: span.own.end] for whole in self._whole)

    def own_gradients(self, span: Span, gradients: _Tensors) -> _Tensors:
        """The whole gradients of the slice's part; ``gradients`` are of all up to this rank's
        end."""
        summed = self._gradients
        if summed is None:  # the last slice
            gradients = tuple(_with_rows(gradient, span.end) for gradient in gradients)
            own = tuple(gradient[span.begin :] for gradient in gradients)
            self._gradients = tuple(gradient[: span.begin].clone() for gradient in gradients)
        else:
            for before, gradient in zip(summed, gradients, strict=True):
                before[: span.own.end] += gradient
            own = tuple(before[span.begin : span.end] for before in summed)
        if span.begin == 0:
            self._whole, self._gradients = (), None
        return own


class _Attended(torch.autograd.Function):
    """Writes a slice's keys and values, and gives all up to it."""

    @staticmethod
    def forward(
        ctx: Any,
        buffers: _Buffers,
        span: Span,
        ranks: dist.ProcessGroup | None,
        *tensors: Tensor,
    ) -> _Tensors:
        ctx.buffers, ctx.span, ctx.ranks = buffers, span, ranks
        return buffers.write(span, tensors, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        own = ctx.buffers.own_gradients(ctx.span, gradients)
        if ctx.span.ranks > 1:
            own = tuple(_scattered(whole, ctx.span.ranks, ctx.ranks) for whole in own)
        return (None, None, None, *own)


def _with_rows(gradient: Tensor, rows: int) -> Tensor:
    """``gradient``, with zeros behind it: nothing of this rank attends to what is there."""
    missing = rows - len(gradient)
    return pad(gradient, (0, 0) * (gradient.dim() - 1) + (0, missing)) if missing else gradient


def _scattered(whole: Tensor, ranks: int, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's part of the sum over the group of ``whole``, a slice's."""
    own = whole.new_empty((len(whole) // ranks, *whole.shape[1:]))
    dist.reduce_scatter_tensor(own, whole.contiguous(), group=group)
    return own


running_slice = RunningSlice()
