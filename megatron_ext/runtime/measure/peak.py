"""Peak memory of the passes of one step on a rank, defined as in a program's memory account: read
after each pass, without the temporaries of the pass.

Nothing is synchronized (`held_bytes`). On the CPU, inspecting each saved tensor takes longer than
some passes, so such a step must not be timed.
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
    """Counter of a step's peak memory on a GPU, beyond the memory allocated at the step's start.

    Attributes:
        peak: peak in bytes over the passes so far, read from torch's caching allocator.
    """

    def __init__(self) -> None:
        self.peak = 0
        self._before = torch.cuda.memory_allocated()

    @contextlib.contextmanager
    def around(self, action: Action) -> Iterator[None]:
        yield
        self.peak = max(self.peak, torch.cuda.memory_allocated() - self._before)

    def per_microbatch(self, *, largest: bool = False) -> dict[tuple[int, Held], float]:
        return {}


class SavedPeak(SavedTensors):
    """Counter of a step's peak memory on the CPU.

    Counted are the tensors that autograd saves and that the queue of weight gradients stores.
    ``peak`` is in bytes, as in `AllocatedPeak`.
    """

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
    """Return the counter of peak memory for a step that begins now on ``device``.

    ``models`` are the chunks of the rank.
    """
    return AllocatedPeak() if device.type == "cuda" else SavedPeak(models)
