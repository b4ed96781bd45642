"""Stages as the runtime sees them.

The executor runs models it knows nothing about. A stage is anything with these methods, one for
each kind of pass, so that emulated stages can be run as Megatron's are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class RunnableStage(Protocol):
    """Stage of a model, which stores what it needs between the passes of a microbatch.

    ``x`` is the stage's input (None on the first stage, which reads the data), ``dy`` the gradient
    of its output (None on the last stage, which has the loss). With vocabulary parallelism
    (`vocabulary`) all stages get both: the first one gets embeddings as its input, and the last one
    returns hidden states.
    """

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor:
        """F: return the output of a forward pass.

        If a recompute (R) will follow, store only what the recompute needs.
        """

    def recompute(self, microbatch: int) -> None:
        """R: repeat F with the same results, and store what the backward pass needs."""

    def backward(self, microbatch: int, dy: Tensor | None) -> Tensor | None:
        """B: add this microbatch's weight gradients, and return the gradient of ``x``."""

    def backward_input(self, microbatch: int, dy: Tensor | None) -> Tensor | None:
        """I: return the gradient of ``x``, and store what W needs."""

    def backward_weight(self, microbatch: int) -> None:
        """W: add this microbatch's weight gradients, and store nothing."""

    def overlapped_forward(
        self, microbatch: int, x: Tensor | None, backward: Backward
    ) -> tuple[Tensor, Tensor | None]:
        """Run F and ``backward`` as one overlapped pass.

        ``backward`` is of this or another stage of this rank. Returns the output of F, and the
        gradient of the input of the backward pass's stage.
        """

    def output_sent(self, microbatch: int) -> None:
        """Note that the output of ``microbatch`` has been sent, so that its data may be freed."""

    def gradients_complete(self) -> None:
        """Note that the stage has all weight gradients of the step.

        Their reduction may start.
        """

    def forget(self) -> None:
        """Discard everything of the step, because it restarts; no backward pass has run yet."""


@dataclass(frozen=True)
class Backward:
    """Backward pass of a stage that will run next.

    Attributes:
        is_full: whether it is a full backward pass (B), and not that of the input gradient alone
            (I).
        dy: gradient of the stage's output; None on a stage with the loss.
    """

    stage: RunnableStage
    microbatch: int
    dy: Tensor | None
    is_full: bool

    def run(self) -> Tensor | None:
        """Run the backward pass by itself, and return the gradient of the stage's input."""
        run = self.stage.backward if self.is_full else self.stage.backward_input
        return run(self.microbatch, self.dy)
