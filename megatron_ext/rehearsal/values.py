"""Values that made-up peers send to a rehearsed rank: normal, and as large as those of the model.

A product of zeros takes less time than one of numbers, a router sends equal tokens to equal
experts, and uninitialised memory may hold NaN. In each direction the values have the root mean
square of those that the rank itself sends there, measured in the first step, or that the
neighbouring rank sent, if this rank sends nothing there. In the first step the root mean square is
a guess. It is fixed after that step: otherwise a rank that receives values as large as its own
could make them larger from step to step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_ext.rehearsal.record import SentValues
from megatron_ext.rehearsal.request import BACKWARD, FORWARD
from megatron_ext.schedule.action import Kind

# Assumed root mean square of the values in a message, as small models have in their first step:
# outputs of stages; gradients; outputs of the last stage, which its norm has scaled; gradients of
# the loss of one of some thousand tokens.
_GUESSES = {
    FORWARD: 0.03,
    BACKWARD: 1e-3,
    str(Kind.BCAST_S): 1.0,
    str(Kind.BCAST_SW): 1e-4,
    str(Kind.BCAST_EW): 1e-3,
    str(Kind.REDUCE_E): 0.02,
    str(Kind.REDUCE_SI): 0.01,
}
# Messages whose values grow with the loss scale.
_GRADIENTS = (BACKWARD, str(Kind.BCAST_SW), str(Kind.BCAST_EW))
_SLACK = 1 << 16  # numbers in a pool of random values beyond those of the largest tensor
_SHIFTED_ROWS = 64  # number of rows at whose starts copies of a real tensor may begin
_SHIFT = 64 * 17  # numbers between the starts of two successive tensors in the pool


class Values:
    """Values that the made-up peers of one rehearsed rank send.

    All values are cut from one pool of random numbers for each type, at another place each time.
    The pool is allocated in the first step, so that it is there in all timed ones. Real values,
    which another rank has sent, have a pool for each direction, cut at the start of a row so that
    each number stays in its column.

    Attributes:
        loss_scale: factor by which guessed sizes of gradients are multiplied.
    """

    def __init__(
        self,
        neighbours: Mapping[str, float],
        loss_scale: float = 1.0,
        *,
        are_zeros: bool = False,
        received: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Initialise the values from what is known of those of other ranks.

        Args:
            neighbours: root mean squares of values that a rank which ran before sent, by direction.
            are_zeros: whether peers send zeros.
            received: tensors on the host that other ranks have sent to this one, by direction.
        """
        self.loss_scale = loss_scale
        self._neighbours = neighbours
        self._are_zeros = are_zeros
        self._received = received or {}
        # Rows of real values on the device, by direction of the message.
        self._real: dict[str, Tensor] = {}
        # Copies of the tensors that this rank sends, by direction of the message.
        self._kept: dict[str, Tensor] | None = None
        # Mean squares of the messages that were sent in the first step.
        self._squares: dict[str, list[float]] = defaultdict(list)
        self._sent: dict[str, SentValues] = {}
        self._is_first = True
        self._pools: dict[torch.dtype, Tensor] = {}
        self._generators: dict[torch.device, torch.Generator] = {}
        self._filled = 0

    @property
    def pool_bytes(self) -> int:
        """Bytes on the device of the values that messages are filled with."""
        return sum(pool.nbytes for pool in (*self._pools.values(), *self._real.values()))

    def keep_sent(self) -> None:
        """From now on, copy the first tensor that this rank sends in each direction to the host."""
        self._kept = {}

    def kept(self) -> dict[str, Tensor]:
        """Return the tensors copied since `keep_sent`, by direction, and stop copying."""
        kept, self._kept = self._kept or {}, None
        return kept

    def end_first_step(self) -> None:
        """Fix the size of the values of all later steps, after the first one.

        Raises:
            ValueError: the rank has sent values that are not finite.
        """
        for direction, squares in self._squares.items():
            rms = math.sqrt(sum(squares) / len(squares))
            if not math.isfinite(rms):
                raise ValueError(
                    f"the values that this rehearsed rank sends ({direction}) are not finite in "
                    "its first step"
                )
            sent = self._sent[direction]
            self._sent[direction] = SentValues(direction, rms, sent.shape, sent.dtype)
        self._is_first = False

    def sent(self) -> tuple[SentValues, ...]:
        """Return the size of the values that this rank has sent in its first step, by direction."""
        assert not self._is_first
        return tuple(self._sent.values())

    def note(self, direction: str, tensor: Tensor) -> None:
        """Note that this rank sends ``tensor``; in the first step, wait to measure its size."""
        if self._kept is not None and direction in (FORWARD, BACKWARD):
            self._kept.setdefault(direction, tensor.detach().to("cpu", copy=True))
        if not self._is_first or not tensor.is_floating_point():
            return
        norm = torch.linalg.vector_norm(tensor.detach(), dtype=torch.float32).item()
        self._squares[direction].append(norm**2 / tensor.numel())
        self._sent[direction] = SentValues(
            direction, 0.0, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        )

    def fill(self, direction: str, tensor: Tensor) -> None:
        """Overwrite ``tensor`` with values of a peer. Only the first step allocates memory."""
        flat = tensor.detach().view(-1)
        if self._are_zeros:
            flat.zero_()
        elif direction in self._received:
            self._fill_really(direction, tensor.detach())
        else:
            torch.mul(self._cut(flat), self._rms(direction), out=flat)

    def _fill_really(self, direction: str, tensor: Tensor) -> None:
        """Overwrite ``tensor`` with rows of a real tensor, from another first row each time."""
        rows = tensor.view(-1, tensor.shape[-1])
        real = self._received[direction]
        if real.shape[-1] != rows.shape[-1]:
            raise ValueError(
                f"the tensor received {direction} has rows of {rows.shape[-1]} numbers, and the "
                "real values, which a rank rehearsed earlier has sent, have rows of "
                f"{real.shape[-1]}"
            )
        if direction not in self._real or len(self._real[direction]) < len(rows) + _SHIFTED_ROWS:
            real = real.view(-1, real.shape[-1]).to(tensor.device, tensor.dtype)
            number = len(rows) + _SHIFTED_ROWS
            self._real[direction] = real.repeat(-(-number // len(real)), 1)[:number].clone()
        self._filled += 1
        start = self._filled % _SHIFTED_ROWS
        rows.copy_(self._real[direction][start : start + len(rows)])

    def add(self, direction: str, tensor: Tensor, peers: int) -> None:
        """Add the parts of made-up ``peers`` to ``tensor``, this rank's own part of a sum.

        Each peer's part is as large as the rank's own.
        """
        self.note(direction, tensor)
        flat = tensor.detach().view(-1)
        flat.add_(self._cut(flat), alpha=self._rms(direction) * math.sqrt(peers))

    def fill_tokens(self, tensor: Tensor, vocabulary: int) -> None:
        """Overwrite ``tensor`` with random tokens or labels below ``vocabulary``."""
        tensor.random_(0, vocabulary, generator=self._generator(tensor.device))

    def _rms(self, direction: str) -> float:
        sent = 0.0 if self._is_first else getattr(self._sent.get(direction), "rms", 0.0)
        guess = _GUESSES[direction]
        if direction in _GRADIENTS:
            guess *= self.loss_scale
        return sent or self._neighbours.get(direction, 0.0) or guess

    def _cut(self, flat: Tensor) -> Tensor:
        """Return as many random numbers as ``flat`` has, cut from a new place of the pool."""
        pool = self._pools.get(flat.dtype)
        if pool is None or len(pool) < len(flat) + _SLACK:
            pool = torch.empty(len(flat) + _SLACK, dtype=flat.dtype, device=flat.device)
            self._pools[flat.dtype] = pool.normal_(generator=self._generator(flat.device))
        self._filled += 1
        start = self._filled * _SHIFT % _SLACK
        return pool[start : start + len(flat)]

    def _generator(self, device: torch.device) -> torch.Generator:
        """Return a random generator for made-up values; those of the training are not touched."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(0)
        return self._generators[device]
