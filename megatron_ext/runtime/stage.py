"""The runtime's view of a piece of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Stage(Protocol):
    """One stage. It keeps what it needs between the passes of a microbatch.

    ``x`` is the stage's input (None on the first stage, which reads the data), ``dy`` the gradient
    of its output (None on the last stage, which holds the loss). With vocabulary parallelism
    (`vocabulary`) both are given on all stages: the first has the embeddings for its input, and the
    last gives hidden states.
    """

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor:
        """F: return the output. Where R will follow, keep nothing but what that needs."""
        ...

    def recompute(self, microbatch: int) -> None:
        """R: run F again as it was, and keep what the backward pass needs."""
        ...

    def backward(self, microbatch: int, dy: Tensor | None) -> Tensor | None:
        """B: add this microbatch's weight gradients, return the gradient of x."""
        ...

    def backward_input(self, microbatch: int, dy: Tensor | None) -> Tensor | None:
        """I: return the gradient of x, keep what W needs."""
        ...

    def backward_weight(self, microbatch: int) -> None:
        """W: add this microbatch's weight gradients, keep nothing."""
        ...

    def forward_beside(
        self, microbatch: int, x: Tensor | None, backward: Backward
    ) -> tuple[Tensor, Tensor | None]:
        """F and ``backward``, which is of this stage or of another one of this rank, as one pass:
        return the output, and the gradient of the other stage's input."""
        ...

    def output_sent(self, microbatch: int) -> None:
        """The output of ``microbatch`` has left: its data may be freed."""
        ...

    def gradients_complete(self) -> None:
        """The step's last weight gradient of this stage is in: synchronisation may start."""
        ...

    def forget(self) -> None:
        """The step begins again, before any backward pass: keep nothing of it."""
        ...


@dataclass(frozen=True)
class Backward:
    """A backward pass that is to run: I, or B if it is ``whole``. ``dy``: as `Stage` has it."""

    stage: Stage
    microbatch: int
    dy: Tensor | None
    whole: bool

    def run(self) -> Tensor | None:
        """Run it by itself: return the gradient of x."""
        run = self.stage.backward if self.whole else self.stage.backward_input
        return run(self.microbatch, self.dy)
