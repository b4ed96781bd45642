"""The most that passes hold of a rank's memory in one step, as the memory count of a program has
it: after passes, without what they need meanwhile.

Nothing is synchronised for it (`held_bytes` says who keeps the books). On the CPU looking at each
saved tensor takes longer than some passes, so such a step is none to be timed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron_ext.runtime.held_bytes import SavedTensors
from megatron_ext.schedule.action import Action
from megatron_ext.schedule.kinds import Held


class AllocatedPeak:
    """By a GPU's allocator: what has been handed out since the step's begin, which is now.

    Attributes:
        peak: bytes, of the passes so far.
    """

    def __init__(self) -> None:
        self.peak = 0
        self._before = torch.cuda.memory_allocated()

    @contextlib.contextmanager
    def around(self, action: Action) -> Iterator[None]:
        yield
        self.peak = max(self.peak, torch.cuda.memory_allocated() - self._before)

    def per_microbatch(self) -> dict[tuple[int, Held], float]:
        return {}


class SavedPeak(SavedTensors):
    """By what autograd and the queue of weight gradients keep. ``peak``: as `AllocatedPeak`'s."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        super().__init__(parameter for model in models for parameter in model.parameters())
        self.peak = 0
        self._sizes: dict[int, int] = {}

    @contextlib.contextmanager
    def around(self, action: Action) -> Iterator[None]:
        with super().around(action):
            yield
        gone = [address for address in self._sizes if self._references[address].expired()]
        for address in gone:
            del self._sizes[address]
        self.peak = max(self.peak, sum(self._sizes.values()))

    def _note(self, tensor: Tensor, held: Held, whose: tuple[int, int]) -> None:
        super()._note(tensor, held, whose)
        storage = tensor.untyped_storage()
        if storage._cdata in self._references:
            self._sizes[storage._cdata] = storage.nbytes()


PeakBytes = AllocatedPeak | SavedPeak


def peak_on(device: torch.device, models: Sequence[torch.nn.Module]) -> PeakBytes:
    """The count for a step of ``models``, the chunks of a rank on ``device``, which begins now."""
    return AllocatedPeak() if device.type == "cuda" else SavedPeak(models)
