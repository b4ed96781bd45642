"""The one queue in which weight gradients wait for their W pass.

A layer that splits its backward puts here, during I, how to compute its weight's gradient; W runs
what its stage and microbatch have put. Whoever the layer is, it is the same queue.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Key = tuple[int, int]  # stage, microbatch
Weights = tuple[Tensor, ...]
Contribution = Tensor | None  # None: none, or it has been added already
Contributions = tuple[Contribution, ...]
Accumulate = Callable[[Weights, Contributions], None]


@dataclass
class _Uses:
    """Of the same weights in one backward pass of autograd's: what makes their contributions, and
    what adds the contributions' sum to the gradients."""

    accumulate: Accumulate
    computes: list[Callable[[], Contribution | Contributions]] = field(default_factory=list)


class WeightGradients:
    """Pending weight gradients by stage and microbatch.

    ``splitting`` tells layers, in the forward pass, that a W pass will come, but not for the
    weights in ``at_once``. ``weights`` collects whose gradients are put off, while it is a set and
    not None. ``is_lent`` tells of a tensor whether its memory is written to again soon after I, as
    that of CUDA graphs is. The current key is a plain attribute and not a thread's: autograd runs
    backwards, and with activation recompute forwards too, on threads of its own.
    """

    def __init__(self) -> None:
        self.splitting = False
        self.at_once: frozenset[Tensor] = frozenset()
        self.weights: set[Tensor] | None = None
        self.is_lent: Callable[[Tensor], bool] = is_owned
        self._key: Key | None = None
        self._pending: dict[Key, dict[tuple[Weights, int], _Uses]] = {}
        self._tensors: dict[Key, list[Tensor]] = {}

    def splits(self, weight: Tensor) -> bool:
        """Whether the gradient of ``weight`` is to be put off."""
        return self.splitting and weight not in self.at_once

    def keep(self, tensor: Tensor) -> Tensor:
        """``tensor``, which is read later than in I, or a copy where its memory is lent."""
        return tensor.clone() if self.is_lent(tensor) else tensor

    def __len__(self) -> int:
        return len(self._pending)

    @contextlib.contextmanager
    def collecting(self, stage: int, microbatch: int) -> Iterator[None]:
        """Around an I pass: what layers put belongs to this stage and microbatch."""
        self._key = (stage, microbatch)
        self._pending[self._key] = {}
        self._tensors[self._key] = []
        try:
            yield
        finally:
            self._key = None

    def put(
        self, weight: Tensor, compute: Callable[[], Contribution], tensors: Iterable[Tensor]
    ) -> None:
        """Keep ``compute``, which returns one contribution to ``weight``'s gradient, for W.

        It returns None where it adds its contribution to the gradient itself. ``tensors`` are those
        that it keeps until then: they may be offloaded.
        """
        self._put((weight,), compute, tensors, accumulate_each)

    def put_together(
        self,
        weights: Weights,
        compute: Callable[[], Contributions],
        tensors: Iterable[Tensor],
        accumulate: Accumulate,
    ) -> None:
        """Keep ``compute``, which makes the gradients of several weights at once, for W.

        It returns a contribution to each of ``weights``, or None as for `put`, and keeps
        ``tensors``. ``accumulate`` is called once for all uses of the weights in one backward pass
        of autograd's, with their sum.
        """
        self._put(weights, compute, tensors, accumulate)

    def tensors(self, stage: int, microbatch: int) -> Sequence[Tensor]:
        """The tensors that wait for the W pass of this stage and microbatch."""
        return self._tensors[stage, microbatch]

    def _put(
        self,
        weights: Weights,
        compute: Callable[[], Contribution | Contributions],
        tensors: Iterable[Tensor],
        accumulate: Accumulate,
    ) -> None:
        assert self._key is not None, "a split layer ran its backward outside an I pass"
        if self.weights is not None:
            self.weights.update(weights)
        self._tensors[self._key] += tensors
        backward = torch._C._current_graph_task_id()
        uses = self._pending[self._key].setdefault((weights, backward), _Uses(accumulate))
        uses.computes.append(compute)

    def run(self, stage: int, microbatch: int) -> None:
        """The W pass. A weight used several times has its contributions summed before they are
        added, as autograd does, so that the sum's order is stock's. Uses that are recomputed each
        have a backward pass of their own within I, and are added one by one."""
        pending = self._pending.pop((stage, microbatch))
        del self._tensors[stage, microbatch]
        with torch.no_grad():
            while pending:
                weights, backward = next(iter(pending))
                uses = pending.pop((weights, backward))
                gradients = _as_tuple(uses.computes.pop(0)())
                for compute in uses.computes:
                    gradients = tuple(map(_sum, gradients, _as_tuple(compute())))
                uses.accumulate(weights, gradients)

    def clear(self) -> None:
        """Forget everything: after a step that failed."""
        self._pending.clear()
        self._tensors.clear()
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
