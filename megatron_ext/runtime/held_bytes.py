"""What a microbatch holds between its passes, counted in one step.

On a GPU it is what the allocator says at the passes' ends: a host's book-keeping, for which nothing
is synchronised. On the CPU nobody keeps such books. There a hook looks at what autograd saves in F,
and the queue of weight gradients is asked what it keeps from I to W. A storage counts once, and not
if it is a parameter's or belongs to several microbatches, as a mask does.

Where F keeps its stage's input alone, R makes the activation, and is what is counted. (The input is
a message's bytes, which are known.)

The hooks are for the CPU alone: a weight that goes through them comes back as another object, and
the fused kernels that add to ``weight.main_grad`` are a GPU's.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_ext.runtime.weight_gradients import queue
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.kinds import RULES, Held

_Microbatch = tuple[int, int]  # stage, microbatch


class HeldBytes(Protocol):
    """Counts around the passes of one step."""

    def around(self, action: Action) -> AbstractContextManager[None]:
        """Count within, around a pass."""
        ...

    def per_microbatch(self) -> dict[tuple[int, Held], float]:
        """Bytes by stage and kind of memory, after the step: the median of its microbatches."""
        ...


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


class SavedTensors:
    """What autograd and the queue of weight gradients keep."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = {parameter.untyped_storage()._cdata for parameter in parameters}
        # A weak reference to a storage keeps its address, so that no other comes to have it.
        self._references: dict[int, StorageWeakRef] = {}
        self._microbatches: dict[int, set[int]] = defaultdict(set)
        self._held: dict[tuple[Held, _Microbatch], dict[int, int]] = {}

    @contextlib.contextmanager
    def around(self, action: Action) -> Iterator[None]:
        whose = action.stage, action.microbatch
        kinds = RULES[action.kind].covers
        if _makes_activation(action):
            self._held[Held.ACTIVATION, whose] = {}
            with torch.autograd.graph.saved_tensors_hooks(self._look(whose), _unchanged):
                yield
            return
        yield
        if kinds == (Kind.BACKWARD_INPUT,):
            self._held[Held.WEIGHT_INPUTS, whose] = {}
            for tensor in queue.tensors(*whose):
                self._note(tensor, Held.WEIGHT_INPUTS, whose)

    def per_microbatch(self) -> dict[tuple[int, Held], float]:
        groups = defaultdict(list)
        for (held, (stage, _)), sizes in self._held.items():
            own = [size for address, size in sizes.items() if len(self._microbatches[address]) == 1]
            groups[stage, held].append(sum(own))
        return {key: statistics.median(group) for key, group in groups.items()}

    def _look(self, whose: _Microbatch) -> Callable[[Tensor], Tensor]:
        def pack(tensor: Tensor) -> Tensor:
            self._note(tensor, Held.ACTIVATION, whose)
            return tensor.detach()  # the same memory: with its graph it would keep itself alive

        return pack

    def _note(self, tensor: Tensor, held: Held, whose: _Microbatch) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._parameters:
            return
        if address not in self._references:
            self._references[address] = StorageWeakRef(storage)
        self._microbatches[address].add(whose[1])
        self._held[held, whose][address] = storage.nbytes()


class Allocated:
    """What a GPU's allocator says. A stage's output leaves, and its input has come before.

    Counted is what has been handed out and not given back, in the host's order: what a microbatch
    holds. What is in use (``active_bytes``) is more, and no microbatch's: memory given back while a
    message's stream has not passed it yet. How much there is of that depends on how far the host is
    ahead; it belongs to a step's peak.
    """

    def __init__(self, stages: int, message_bytes: int) -> None:
        self._last = stages - 1
        self._message_bytes = message_bytes
        self._gained: dict[tuple[int, Held], dict[int, int]] = defaultdict(dict)

    @contextlib.contextmanager
    def around(self, action: Action) -> Iterator[None]:
        before = torch.cuda.memory_allocated()
        yield
        gained = torch.cuda.memory_allocated() - before
        stage, kind, microbatch = action
        if _makes_activation(action):
            # The output of R leaves nobody: it is given back within.
            leaves = kind is Kind.FORWARD and stage < self._last
            gained += ((stage > 0) - leaves) * self._message_bytes
            self._gained[stage, Held.ACTIVATION][microbatch] = gained
        elif RULES[kind].covers == (Kind.BACKWARD_WEIGHT,):
            self._gained[stage, Held.WEIGHT_INPUTS][microbatch] = -gained

    def per_microbatch(self) -> dict[tuple[int, Held], float]:
        groups = self._gained.items()
        return {key: max(statistics.median(group.values()), 0.0) for key, group in groups}


def reserved_beyond_allocated(device: torch.device) -> float | None:
    """Bytes between the most that a GPU's allocator has taken and the most that it has handed out,
    both so far: what is lost to fragmentation. None: ``device`` has no such allocator."""
    if device.type != "cuda":
        return None
    return torch.cuda.max_memory_reserved() - torch.cuda.max_memory_allocated()


def _makes_activation(action: Action) -> bool:
    return Kind.FORWARD in (action.kind, RULES[action.kind].repeats)
