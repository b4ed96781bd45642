"""Queue in which weight gradients wait for their W pass; one for all kinds of layer.

A layer that splits its backward pass puts a function into the queue during I, which computes its
weight's gradient. W runs the functions of its stage and microbatch.

Two measures hide tensor-parallel communication, as a whole backward pass does. In W, the gather for
the next product runs while the current one is computed. In I, a layer signals that the reduction of
its input's gradient has started: if W follows directly, the previous layer's weight gradient is
computed meanwhile.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_ext.runtime.parameter_hooks import hand_over

PassKey = tuple[int, int]  # stage, microbatch
Weights = tuple[Tensor, ...]
# Gradient of a weight in one pass; None if the pass has none, or has added it to main_grad.
Contribution = Tensor | None
Contributions = tuple[Contribution, ...]
Accumulate = Callable[[Weights, Contributions], None]
Lent = Callable[[Tensor], bool]


@dataclass(frozen=True)
class RowProduct[Made: Contribution | Contributions]:
    """Product over rows that gives a weight's gradient, and can be joined with other products.

    Attributes:
        operands: returns the operands, rows first, after waiting for a gather.
        product: returns the gradient's contribution by the operands; operands of several uses of
            the weights may be concatenated.
    """

    operands: Callable[[], tuple[Tensor, ...]]
    product: Callable[..., Made]

    def __call__(self) -> Made:
        return self.product(*self.operands())


@dataclass(frozen=True)
class _Use:
    """Deferred contribution to a gradient, computed from ``tensors`` in W.

    ``gather`` starts the communication that ``compute`` waits for.
    """

    compute: Callable[[], Contribution | Contributions]
    tensors: tuple[Tensor, ...]
    gather: Callable[[], None] | None = None

    @staticmethod
    def joined(uses: Sequence[_Use]) -> _Use:
        """Return one deferred contribution with the rows of all ``uses``.

        Each of them is a product over rows.
        """
        rows = [use.compute for use in uses if isinstance(use.compute, RowProduct)]
        gathers = [use.gather for use in uses if use.gather is not None]

        def operands() -> tuple[Tensor, ...]:
            return tuple(map(torch.cat, zip(*(one.operands() for one in rows), strict=True)))

        def gather() -> None:
            for begin in gathers:
                begin()

        tensors = tuple(tensor for use in uses for tensor in use.tensors)
        return _Use(RowProduct(operands, rows[0].product), tensors, gather if gathers else None)


@dataclass
class _Uses:
    """Deferred contributions to the gradients of the same weights in one backward pass of autograd.

    ``uses`` compute the contributions, and ``accumulate`` adds their sum to the gradients.
    """

    accumulate: Accumulate
    uses: list[_Use] = field(default_factory=list)


def _joined(of_slices: Sequence[_Uses]) -> Sequence[_Uses]:
    """Return the contributions of all slices of a sequence to the same weights, joined if possible.

    They are joined if all are products of rows; otherwise they stay separate, from the last slice
    to the first.
    """
    first, *others = of_slices
    are_rows = all(isinstance(use.compute, RowProduct) for uses in of_slices for use in uses.uses)
    if not are_rows or any(len(uses.uses) != len(first.uses) for uses in others):
        return of_slices[::-1]
    by_use = zip(*(uses.uses for uses in of_slices), strict=True)
    return [_Uses(first.accumulate, [_Use.joined(uses) for uses in by_use])]


class _GathersAhead:
    """Runner of deferred contributions (`_Use`) in order, which starts their gathers ahead.

    The gather of the next contribution runs during the current product; never more than one runs.
    """

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
    """Queue of deferred weight gradients, by stage and microbatch, which W passes compute.

    Attributes:
        splitting: tells layers, in the forward pass, that a W pass will follow.
        at_once: weights whose gradients are not deferred, although W passes follow.
        w_is_next: whether the rank computes nothing between the running input-gradient pass (I) and
            its weight-gradient pass (W).
        weights: set that collects the weights whose gradients are deferred; None collects nothing.
        is_lent: tells whether a tensor's memory is overwritten soon after I, as that of CUDA graphs
            is.

    The current key is a plain attribute, not thread-local: autograd runs backward passes, and with
    activation recompute forward passes too, on threads of its own.
    """

    def __init__(self) -> None:
        self.splitting = False
        self.at_once: frozenset[Tensor] = frozenset()
        self.weights: set[Tensor] | None = None
        self.is_lent: Lent = is_owned
        self._key: PassKey | None = None
        self._pending: dict[PassKey, dict[tuple[Weights, int], _Uses]] = {}
        self.w_is_next = False
        # Weights that every backward pass of this step so far has used only once.
        self._used_once: set[Weights] = set()

    def splits(self, weight: Tensor) -> bool:
        """Return whether the gradient of ``weight`` is deferred to W.

        A weight that is computed from others (a parametrization, a mask), or that has hooks of the
        caller's, gets its gradient in I: only autograd can pass it on, and only autograd runs
        hooks.
        """
        return (
            self.splitting
            and weight not in self.at_once
            and weight.is_leaf
            and not weight._backward_hooks
            and not weight._post_accumulate_grad_hooks
        )

    def keep(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``, to be read in W, or a copy if its memory is overwritten before.

        W is the weight-gradient pass that follows the input-gradient pass of a microbatch.
        """
        return tensor.clone() if self.is_lent(tensor) else tensor

    def __len__(self) -> int:
        return len(self._pending)

    @contextlib.contextmanager
    def collecting(self, stage: int, microbatch: int, *, w_is_next: bool = False) -> Iterator[None]:
        """Context of an input-gradient pass (I), to which deferred weight gradients belong.

        The queue stores them by the pass's stage and microbatch.

        ``w_is_next``: the rank computes nothing between this pass and its weight-gradient pass (W).
        """
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
        """Store ``compute``, which returns one contribution to ``weight``'s gradient, for W.

        ``compute`` returns None if it adds its contribution to the gradient itself. ``tensors`` are
        those that ``compute`` references until then: they may be offloaded. ``gather`` starts
        communication that ``compute`` waits for, and is called once before it, in the order of
        puts.
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
        """Store ``compute``, which computes the gradients of several weights together, for W.

        ``compute`` returns a contribution to each of ``weights``, or None as in `put`, and
        references ``tensors``. ``accumulate`` is called once with the sum of all uses of the
        weights in one backward pass of autograd.
        """
        self._put(weights, _Use(compute, tuple(tensors), gather), accumulate)

    def tensors(self, stage: int, microbatch: int) -> Sequence[Tensor]:
        """Return the tensors that are stored for the W pass of this stage and microbatch."""
        pending = self._pending[stage, microbatch].values()
        return [tensor for uses in pending for use in uses.uses for tensor in use.tensors]

    @property
    def is_in_pass(self) -> bool:
        """Whether an input-gradient pass of the schedule runs, not a caller's own backward pass."""
        return self._key is not None

    def _put(self, weights: Weights, use: _Use, accumulate: Accumulate) -> None:
        if self._key is None:
            _add_at_once(weights, use, accumulate)
            return
        if self.weights is not None:
            self.weights.update(weights)
        backward = torch._C._current_graph_task_id()
        uses = self._pending[self._key].setdefault((weights, backward), _Uses(accumulate))
        uses.uses.append(use)

    def compute_meanwhile(self) -> None:
        """Compute the previous layer's weight gradient while a reduction runs in a backward pass.

        This happens if the weight-gradient pass (W) follows the running input-gradient pass
        directly. A gradient is skipped if it would wait for a gather, or if its weights are used
        several times in a backward pass, whose contributions are summed first. The first W pass of
        a step shows which weights are used several times.
        """
        if self._key is None:
            return
        pending = self._pending[self._key]
        if not (self.w_is_next and pending):
            return
        (weights, backward), uses = next(reversed(pending.items()))
        if weights in self._used_once and uses.uses[0].gather is None:
            del pending[weights, backward]
            with torch.no_grad():
                uses.accumulate(weights, _as_tuple(uses.uses.pop().compute()))

    def run(self, stage: int, microbatch: int) -> None:
        """Run the weight-gradient pass (W) of a stage and microbatch.

        The contributions to a weight that is used several times are summed before they are added,
        as autograd does, so that the order of summation is stock's. Uses that are recomputed each
        have a backward pass of their own within the input-gradient pass, and are added one by one.
        """
        self.run_so_far(stage, microbatch)
        del self._pending[stage, microbatch]

    def run_joined(self, stage: int, slices: Sequence[int]) -> None:
        """Run the W passes of the ``slices`` of a microbatch's sequences as one pass.

        ``slices`` are in the order of the sequence. Each product of rows takes the rows of all
        slices, as for a whole microbatch. Other gradients are computed sequentially, from the last
        slice to the first.
        """
        alike: dict[tuple[Weights, int], list[_Uses]] = {}
        for number in slices:
            times = Counter[Weights]()  # a pass with recompute uses some weights several times
            for (weights, _), uses in self._pending.pop((stage, number)).items():
                alike.setdefault((weights, times[weights]), []).append(uses)
                times[weights] += 1
        joined = [(weights, one) for (weights, _), uses in alike.items() for one in _joined(uses)]
        self._pending[stage, slices[0]] = {
            (weights, number): one for number, (weights, one) in enumerate(joined)
        }
        self.run(stage, slices[0])

    def run_so_far(self, stage: int, microbatch: int) -> None:
        """Compute the weight gradients that the running input-gradient pass has deferred so far."""
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
        """Drop all deferred weight gradients after a step, for example one that failed."""
        self._pending.clear()
        self._used_once.clear()
        self.splitting = False
        self.at_once = frozenset()
        self.is_lent = is_owned


def _add_at_once(weights: Weights, use: _Use, accumulate: Accumulate) -> None:
    """Add the gradient of a caller's own backward pass, which runs outside of the schedule's.

    An example is a backward pass within a forward pass. No weight-gradient pass will follow it.
    """
    refuse_second_derivatives()
    with torch.no_grad():
        accumulate(weights, _GathersAhead([use]).compute(use))


def refuse_second_derivatives() -> None:
    """Raise RuntimeError if the running backward pass is to be differentiated (create_graph)."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "a backward pass with create_graph=True reached a layer whose backward pass is split "
            "into input and weight gradient: second derivatives need whole backward passes; "
            "choose a schedule that does not split them, such as 1f1b or interleaved"
        )


def is_owned(tensor: Tensor) -> bool:
    """Return False: no tensor's memory is overwritten before the weight-gradient pass."""
    return False


def _as_tuple(made: Contribution | Contributions) -> Contributions:
    return made if isinstance(made, tuple) else (made,)


def _sum(gradient: Contribution, contribution: Contribution) -> Contribution:
    if gradient is None or contribution is None:
        return contribution if gradient is None else gradient
    return gradient + contribution


def accumulate_each(weights: Weights, gradients: Contributions) -> None:
    """Add each of ``gradients`` that is not None to its weight's gradient, with `accumulate`."""
    for weight, gradient in zip(weights, gradients, strict=True):
        if gradient is not None:
            accumulate(weight, gradient)


def accumulate(weight: Tensor, gradient: Tensor) -> None:
    """Add ``gradient`` to ``weight.main_grad`` if a wrapper has set it, else to ``weight.grad``.

    Autograd adds it if the weight has got hooks since its F.
    """
    main_grad = getattr(weight, "main_grad", None)
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        hand_over({weight: gradient})
    elif main_grad is not None:
        main_grad.add_(gradient)
    else:
        add_to_grad(weight, gradient)


def add_to_grad(weight: Tensor, gradient: Tensor) -> None:
    """Add ``gradient`` to ``weight.grad``, or set it if there is none."""
    if weight.grad is None:
        weight.grad = gradient
    else:
        weight.grad.add_(gradient)


queue = WeightGradients()
