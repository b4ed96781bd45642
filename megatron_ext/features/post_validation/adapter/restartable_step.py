"""Training step that begins before the previous step's post-validation, which may restart it.

If the previous optimizer step is rolled back, this step restarts. The effects of its first forward
passes are undone: random states are restored, and the data read so far is read again from memory.
"""

from __future__ import annotations

import copy
import functools
import random
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_ext.features.post_validation.adapter.optimizer import SpeculativeOptimizer
from megatron_ext.features.post_validation.adapter.pending import PostValidation, post_validation
from megatron_ext.features.post_validation.runtime.actions import Validation
from megatron_ext.features.post_validation.runtime.messages import ValidationMessages
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.schedule.placement import Placement


def connect_validation(
    pipeline: dist.ProcessGroup, placement: Placement, recorder: Recorder, models: Sequence[Any]
) -> None:
    """Connect the ranks of ``pipeline`` for post-validation, and let steps be speculative.

    ``models`` are the chunks of this rank. Collective over ``pipeline``.
    """
    messages = ValidationMessages(pipeline, placement, recorder)
    post_validation.connect(messages, functools.partial(SpeculativeOptimizer, models=models))


class SpeculativeStep(Validation):
    """Training step that may restart if the previous optimizer step is rolled back.

    ``iterators`` are the data iterators of the rank's chunks; the step reads from the attribute
    `iterators`.
    """

    def __init__(
        self,
        validation: PostValidation,
        iterators: list[Any],
    ) -> None:
        self._validation = validation
        self._messages = validation.messages
        self.iterators = iterators
        if validation.is_pending:
            self._random = _random_states()
            self.iterators = [None if data is None else Rereadable(data) for data in iterators]

    def expect(self) -> None:
        self._messages.expect()

    def commit_or_rollback(self) -> bool:
        if not self._validation.is_pending:
            return True
        stands = self._validation.verdict(self._messages.verdict())
        for data in self.iterators:
            if data is not None and stands:
                data.commit()
            elif data is not None:
                data.rollback()
        if not stands:
            _restore(self._random)
        return stands

    def abandon(self) -> None:
        self._messages.abandon()

    def defer_scaling(
        self, tokens: torch.Tensor, models: Sequence[Any], groups: Any
    ) -> torch.Tensor | None:
        """Return the ``tokens`` by which to scale gradients after the passes.

        The result is None while optimizer steps are taken before their post-validation, because
        such steps scale gradients by the tokens of the ranks up to this one.
        """
        if not self._validation.is_armed:
            return tokens
        self._validation.scale_by_tokens(
            int(tokens), functools.partial(_scale_gradients, models, groups)
        )
        return None


class Rereadable:
    """Iterator that remembers its items until it is known whether they are read a second time."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._read: list[Any] | None = []
        self._reread: deque[Any] = deque()

    def __iter__(self) -> Rereadable:
        return self

    def __next__(self) -> Any:
        if self._reread:
            return self._reread.popleft()
        item = next(self._iterator)
        if self._read is not None:
            # A copy of the item is stored, as the code that reads a batch may change its entries.
            self._read.append(copy.copy(item))
        return item

    def commit(self) -> None:
        """Drop the items read so far, and remember no further item."""
        assert self._read is not None
        self._read = None

    def rollback(self) -> None:
        """Make the iterator repeat the items of this step, before it reads further ones.

        Items that are read from now on cannot be repeated.
        """
        assert self._read is not None
        self._reread.extend(self._read)
        self._read = None


def _scale_gradients(models: Sequence[Any], groups: Any, tokens: int) -> None:
    """Divide the gradients by the ``tokens`` of all data-parallel replicas of this pipeline.

    Megatron's finalize_model_grads does so once it has the number from the last rank.
    """
    replicas = getattr(groups, "dp_cp_gtp_remat", None) or groups.dp_cp
    total = torch.tensor(tokens, dtype=torch.int, device=torch.cuda.current_device())
    dist.all_reduce(total, group=replicas)
    for model in models:
        model.scale_gradients(1.0 / torch.clamp(total, min=1))


_RandomStates = tuple[Any, Any, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


def _random_states() -> _RandomStates:
    """Return all random states that a forward pass may use, as Megatron's rerun machine does."""
    return (
        random.getstate(),
        np.random.get_state(),
        torch.get_rng_state(),
        torch.cuda.get_rng_state(),
        {name: _value(state) for name, state in get_cuda_rng_tracker().get_states().items()},
    )


def _value(state: torch.Tensor | torch.Generator) -> torch.Tensor:
    """Return a tracked random state as a tensor.

    Transformer Engine's tracker has generators, whose state advances.
    """
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
            # The state is set in the same generator object, since other code may refer to the
            # object.
            tracked[name].set_state(value)
        else:
            tracked[name] = value
    tracker.set_states(tracked)
