"""Memory that a microbatch occupies between its passes, measured in one step.

Limits in bytes, offload and recompute need the bytes that a pass stores for a later one, and
estimates may be off. On a GPU the caching allocator's counter is read at the ends of passes,
without synchronization. A CPU has no such counter; there every tensor that is stored is looked at
(`SavedTensors`). If F saves only its stage's input, the activation is made by R, and R's memory is
counted instead of F's. (The input has the size of a message, which is known.)
"""

from __future__ import annotations

import contextlib
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    """Counter of the memory that a microbatch occupies between the passes of one step."""

    def around(self, action: Action) -> AbstractContextManager[None]:
        """Count the memory change of the enclosed pass."""

    def per_microbatch(self, *, largest: bool = False) -> dict[tuple[int, Held], float]:
        """Return the bytes per microbatch, by stage and kind of memory, after the step.

        They are the median over the microbatches. With ``largest`` they are those of the largest
        microbatch; the first microbatch, in which caches fill, is then ignored.
        """


def _of_one(sizes: Mapping[int, float], *, largest: bool) -> float:
    """Return the median or the largest of ``sizes``, as for `HeldBytes.per_microbatch`."""
    if not largest:
        return statistics.median(sizes.values())
    behind = [size for microbatch, size in sizes.items() if microbatch > 0]
    return max(behind or sizes.values())


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


class SavedTensors:
    """Counter of the tensors that autograd saves and that the queue of weight gradients stores.

    A hook sees each tensor that autograd saves in F, and the queue tells which tensors it stores
    from the input-gradient pass (I) to the weight-gradient pass (W). A storage counts once. A
    storage does not count if it is a parameter's, or if several microbatches share it, like a mask.
    The hooks are for the CPU only: a weight passed through them comes back as another object, and
    fused kernels that add to ``weight.main_grad`` exist only on GPUs.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = {parameter.untyped_storage()._cdata for parameter in parameters}
        # The weak reference keeps the address of a freed storage reserved, so that no other storage
        # gets the address.
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

    def per_microbatch(self, *, largest: bool = False) -> dict[tuple[int, Held], float]:
        groups: dict[tuple[int, Held], dict[int, float]] = defaultdict(dict)
        for (held, (stage, microbatch)), sizes in self._held.items():
            exclusive = [
                size for address, size in sizes.items() if len(self._microbatches[address]) == 1
            ]
            groups[stage, held][microbatch] = sum(exclusive)
        return {key: _of_one(group, largest=largest) for key, group in groups.items()}

    def _look(self, whose: _Microbatch) -> Callable[[Tensor], Tensor]:
        def pack(tensor: Tensor) -> Tensor:
            self._note(tensor, Held.ACTIVATION, whose)
            # A detached tensor refers to the same memory, and does not keep the autograd graph
            # alive.
            return tensor.detach()

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
    """Counter of a microbatch's memory that reads a GPU's caching allocator.

    It corrects for messages: a stage's input was allocated before its pass, and its output is freed
    later.

    It counts allocated memory, in the host's order. Memory in use (``active_bytes``) is larger: it
    includes freed memory that a message's stream has not passed yet. How much depends on how far
    the host is ahead; it belongs to the step's peak, not to a microbatch.
    """

    def __init__(self, stages: int, message_bytes: int) -> None:
        self._last = stages - 1
        self._message_bytes = message_bytes
        self._gained: dict[tuple[int, Held], dict[int, float]] = defaultdict(dict)

    @contextlib.contextmanager
    def around(self, action: Action) -> Iterator[None]:
        before = torch.cuda.memory_allocated()
        yield
        gained = torch.cuda.memory_allocated() - before
        stage, kind, microbatch = action
        if _makes_activation(action):
            # R frees its output at once, since the output of F has been sent already.
            leaves = kind is Kind.FORWARD and stage < self._last
            gained += ((stage > 0) - leaves) * self._message_bytes
            self._gained[stage, Held.ACTIVATION][microbatch] = gained
        elif RULES[kind].covers == (Kind.BACKWARD_WEIGHT,):
            self._gained[stage, Held.WEIGHT_INPUTS][microbatch] = -gained

    def per_microbatch(self, *, largest: bool = False) -> dict[tuple[int, Held], float]:
        groups = self._gained.items()
        return {key: max(_of_one(group, largest=largest), 0.0) for key, group in groups}


def reserved_beyond_allocated(device: torch.device) -> float | None:
    """Return the bytes that the GPU's allocator has reserved beyond those it has allocated.

    The result is the peak of the reserved bytes minus the peak of the allocated bytes: at one time
    at least so much was reserved and unused. None if ``device`` has no such allocator.
    """
    if device.type != "cuda":
        return None
    return torch.cuda.max_memory_reserved() - torch.cuda.max_memory_allocated()


def _makes_activation(action: Action) -> bool:
    return Kind.FORWARD in (action.kind, RULES[action.kind].repeats)
