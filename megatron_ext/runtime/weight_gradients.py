"""The one queue in which weight gradients wait for their W pass.

A layer that splits its backward puts here, during I, how to compute its weight's gradient; W runs
what its stage and microbatch have put. Whoever the layer is, it is the same queue.

Two things keep tensor-parallel communication from being waited for, as a whole backward hides it.
In W what one product needs gathered is on its way while the one before is computed. In I a layer
says when the reduction of its input's gradient is on its way: if W is next anyway, the weight
gradient of the layer before is computed meanwhile.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Key = tuple[int, int]  # stage, microbatch
Weights = tuple[Tensor, ...]
Contribution = Tensor | None  # None: none, or it has been added already
Contributions = tuple[Contribution, ...]
Accumulate = Callable[[Weights, Contributions], None]
Lent = Callable[[Tensor], bool]


@dataclass(frozen=True)
class _Use:
    """What makes a contribution of ``tensors``. ``gather`` begins communication that it waits
    for."""

    compute: Callable[[], Contribution | Contributions]
    tensors: tuple[Tensor, ...]
    gather: Callable[[], None] | None = None


@dataclass
class _Uses:
    """Of the same weights in one backward pass of autograd's: what makes their contributions, and
    what adds the contributions' sum to the gradients."""

    accumulate: Accumulate
    uses: list[_Use] = field(default_factory=list)


class _GathersAhead:
    """Computes in the order of `_Use`s, and has the gather of the next one that needs one begun by
    then: one is under way beside a product, and never more than one."""

    def __init__(self, uses: Iterable[_Use]) -> None:
        self._to_begin = deque(use for use in uses if use.gather is not None)
        self._begun: _Use | None = None

    def compute(self, use: _Use) -> Contributions:
        if use.gather is not None and self._begun is not use:
            self._begin_next()
        if self._begun is use or self._begun is None:
            self._begin_next()
        return _as_tuple(use.compute())

    def _begin_next(self) -> None:
        self._begun = self._to_begin.popleft() if self._to_begin else None
        if self._begun is not None:
            assert self._begun.gather is not None
            self._begun.gather()


class WeightGradients:
    """Pending weight gradients by stage and microbatch.

    ``splitting`` tells layers, in the forward pass, that a W pass will come, but not for the
    weights in ``at_once``. ``w_is_next``: after the I that runs, its rank computes nothing before
    its W. ``weights`` collects whose gradients are put off, while it is a set and not None.
    ``is_lent`` tells of a tensor whether its memory is written to again soon after I, as
    that of CUDA graphs is. The current key is a plain attribute and not a thread's: autograd runs
    backwards, and with activation recompute forwards too, on threads of its own.
    """

    def __init__(self) -> None:
        self.splitting = False
        self.at_once: frozenset[Tensor] = frozenset()
        self.weights: set[Tensor] | None = None
        self.is_lent: Lent = is_owned
        self._key: Key | None = None
        self._pending: dict[Key, dict[tuple[Weights, int], _Uses]] = {}
        self.w_is_next = False
        self._used_once: set[Weights] = set()  # in each backward pass of this step so far

    def splits(self, weight: Tensor) -> bool:
        """Whether the gradient of ``weight`` is to be put off."""
        return self.splitting and weight not in self.at_once

    def keep(self, tensor: Tensor) -> Tensor:
        """``tensor``, which is read later than in I, or a copy where its memory is lent."""
        return tensor.clone() if self.is_lent(tensor) else tensor

    def __len__(self) -> int:
        return len(self._pending)

    @contextlib.contextmanager
    def collecting(self, stage: int, microbatch: int, *, w_is_next: bool = False) -> Iterator[None]:
        """Around an I pass: what layers put belongs to this stage and microbatch. ``w_is_next``:
        the rank computes nothing between this pass and its W."""
        self._key = (stage, microbatch)
        self._pending[self._key] = {}
        self.w_is_next = w_is_next
        try:
            yield
        finally:
            self._key = None
            self.w_is_next = False

    def put(
        self,
        weight: Tensor,
        compute: Callable[[], Contribution],
        tensors: Iterable[Tensor],
        gather: Callable[[], None] | None = None,
    ) -> None:
        """Keep ``compute``, which returns one contribution to ``weight``'s gradient, for W.

        It returns None where it adds its contribution to the gradient itself. ``tensors`` are those
        that it keeps until then: they may be offloaded. ``gather`` begins communication that
        ``compute`` waits for, and is called once before it, in the order of puts.
        """
        self._put((weight,), _Use(compute, tuple(tensors), gather), accumulate_each)

    def put_together(
        self,
        weights: Weights,
        compute: Callable[[], Contributions],
        tensors: Iterable[Tensor],
        accumulate: Accumulate,
        gather: Callable[[], None] | None = None,
    ) -> None:
        """Keep ``compute``, which makes the gradients of several weights at once, for W.

        It returns a contribution to each of ``weights``, or None as for `put`, and keeps
        ``tensors``. ``accumulate`` is called once for all uses of the weights in one backward pass
        of autograd's, with their sum.
        """
        self._put(weights, _Use(compute, tuple(tensors), gather), accumulate)

    def tensors(self, stage: int, microbatch: int) -> Sequence[Tensor]:
        """The tensors that wait for the W pass of this stage and microbatch."""
        pending = self._pending[stage, microbatch].values()
        return [tensor for uses in pending for use in uses.uses for tensor in use.tensors]

    def _put(self, weights: Weights, use: _Use, accumulate: Accumulate) -> None:
        assert self._key is not None, "a split layer ran its backward outside an I pass"
        if self.weights is not None:
            self.weights.update(weights)
        backward = torch._C._current_graph_task_id()
        uses = self._pending[self._key].setdefault((weights, backward), _Uses(accumulate))
        uses.uses.append(use)

    def compute_meanwhile(self) -> None:
        """While a reduction is under way in I: the weight gradient of the layer before, if W is
        next.

        Not one that would have to wait for a gather; nor of weights that are used several times in
        a backward pass, whose contributions are summed first. The first W pass of a step shows
        which those are.
        """
        assert self._key is not None, "a split layer ran its backward outside an I pass"
        pending = self._pending[self._key]
        if not (self.w_is_next and pending):
            return
        (weights, backward), uses = next(reversed(pending.items()))
        if weights in self._used_once and uses.uses[0].gather is None:
            del pending[weights, backward]
            with torch.no_grad():
                uses.accumulate(weights, _as_tuple(uses.uses.pop().compute()))

    def run(self, stage: int, microbatch: int) -> None:
        """The W pass. A weight used several times has its contributions summed before they are
        added, as autograd does, so that the sum's order is stock's. Uses that are recomputed each
        have a backward pass of their own within I, and are added one by one."""
        self.run_so_far(stage, microbatch)
        del self._pending[stage, microbatch]

    def run_so_far(self, stage: int, microbatch: int) -> None:
        """The part of the W pass that the part of I which has run has left."""
        pending = self._pending[stage, microbatch]
        ahead = _GathersAhead(use for uses in pending.values() for use in uses.uses)
        with torch.no_grad():
            while pending:
                weights, backward = next(iter(pending))
                uses = pending.pop((weights, backward))
                self._note_uses(weights, len(uses.uses))
                gradients = ahead.compute(uses.uses.pop(0))
                while uses.uses:
                    gradients = tuple(map(_sum, gradients, ahead.compute(uses.uses.pop(0))))
                uses.accumulate(weights, gradients)

    def _note_uses(self, weights: Weights, number: int) -> None:
        if number == 1:
            self._used_once.add(weights)
        else:
            self._used_once.discard(weights)

    def clear(self) -> None:
        """Forget everything: after a step that failed."""
        self._pending.clear()
        self._used_once.clear()
        self.splitting = False
        self.at_once = frozenset()
        self.is_lent = is_owned


def is_owned(tensor: Tensor) -> bool:
    """No ``tensor`` is lent."""
    return False


def _as_tuple(made: Contribution | Contributions) -> Contributions:
    return made if isinstance(made, tuple) else (made,)


def _sum(gradient: Contribution, contribution: Contribution) -> Contribution:
    if gradient is None or contribution is None:
        return contribution if gradient is None else gradient
    return gradient + contribution


def accumulate_each(weights: Weights, gradients: Contributions) -> None:
    """Add each of ``gradients`` that is not None to its weight's, as `accumulate` does."""
    for weight, gradient in zip(weights, gradients, strict=True):
        if gradient is not None:
            accumulate(weight, gradient)


def accumulate(weight: Tensor, gradient: Tensor) -> None:
    """Add ``gradient`` to ``weight.main_grad`` where a data-parallel wrapper has put one, else to
    ``weight.grad``."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is not None:
        main_grad.add_(gradient)
    else:
        add_to_grad(weight, gradient)


def add_to_grad(weight: Tensor, gradient: Tensor) -> None:
    """Add ``gradient`` to ``weight.grad``."""
    if weight.grad is None:
        weight.grad = gradient
    else:
        weight.grad.add_(gradient)


queue = WeightGradients()
