"""A training step that begins before the last one is validated, and begins again if that was wrong.

What its first forward passes have changed is put back: the state of random generators, and the data
that they have read, which is read again from memory.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_ext.adapter.post_validation.pending import PostValidation
from megatron_ext.runtime.post_validation.actions import Validation
from megatron_ext.runtime.post_validation.messages import ValidationMessages


class SpeculativeStep(Validation):
    """One training step.

    ``iterators`` are those of the rank's chunks; the step reads from `iterators`.
    """

    def __init__(
        self,
        validation: PostValidation,
        messages: ValidationMessages,
        iterators: list[Any],
    ) -> None:
        self._validation = validation
        self._messages = messages
        self.iterators = iterators
        if validation.is_pending:
            self._random = _random_states()
            self.iterators = [None if each is None else Rereadable(each) for each in iterators]

    def expect(self) -> None:
        self._messages.expect()

    def settle(self) -> bool:
        if not self._validation.is_pending:
            return True
        stands = self._validation.verdict(self._messages.verdict())
        for each in self.iterators:
            if each is not None:
                each.settle(read_again=not stands)
        if not stands:
            _restore(self._random)
        return stands

    def abandon(self) -> None:
        self._messages.abandon()


class Rereadable:
    """An iterator that remembers what was read, until it is known whether it is read again."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._read: list[Any] | None = []
        self._again: deque[Any] = deque()

    def __iter__(self) -> Rereadable:
        return self

    def __next__(self) -> Any:
        if self._again:
            return self._again.popleft()
        item = next(self._iterator)
        if self._read is not None:
            self._read.append(copy.copy(item))  # whoever reads it may change its entries
        return item

    def settle(self, *, read_again: bool) -> None:
        """Begin again with what was read first, or go on; remember nothing from now on."""
        assert self._read is not None
        if read_again:
            self._again.extend(self._read)
        self._read = None


_RandomStates = tuple[Any, Any, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


def _random_states() -> _RandomStates:
    """All that a forward pass may draw from, as Megatron's rerun state machine keeps it."""
    return (
        random.getstate(),
        np.random.get_state(),
        torch.get_rng_state(),
        torch.cuda.get_rng_state(),
        {name: _value(state) for name, state in get_cuda_rng_tracker().get_states().items()},
    )


def _value(state: torch.Tensor | torch.Generator) -> torch.Tensor:
    """A tracked state's numbers. Transformer Engine's tracker has generators, which go on."""
    return state.get_state() if isinstance(state, torch.Generator) else state


def _restore(states: _RandomStates) -> None:
    of_python, of_numpy, of_torch, of_device, of_megatron = states
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    torch.set_rng_state(of_torch)
    torch.cuda.set_rng_state(of_device)
    tracker = get_cuda_rng_tracker()
    tracked = tracker.get_states()
    for name, value in of_megatron.items():
        if isinstance(tracked[name], torch.Generator):
            tracked[name].set_state(value)  # the same generator: others may refer to it
        else:
            tracked[name] = value
    tracker.set_states(tracked)
