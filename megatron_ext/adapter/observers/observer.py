"""The interface of what watches training steps: it is called before and after each."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.adapter.programs import Shape
from megatron_ext.adapter.splitting import Split
from megatron_ext.adapter.step.call import Call
from megatron_ext.adapter.step.connections import Connections
from megatron_ext.runtime.messages.transport import Boundary
from megatron_ext.runtime.vocabulary.shard import VocabularyShard
from megatron_ext.schedule.program.verify import Program


@dataclass(frozen=True)
class Step:
    """One step on one rank.

    Attributes:
        call: asks for it.
        connections: to the other ranks.
        program: its program.
        shape: of its microbatches.
        boundary: what passes between stages, with its shape.
        shard: of a divided vocabulary.
        split: which weight gradients wait for W passes.
    """

    call: Call
    connections: Connections
    program: Program
    shape: Shape
    boundary: Boundary
    shard: VocabularyShard | None
    split: Split


class StepObserver:
    """Watches training steps, and changes nothing of what they compute."""

    def begin(self, step: Step) -> None:
        """Called before the passes."""

    def end(self, step: Step) -> None:
        """Called after the passes and the reductions, but not after a step that has failed."""

    def finish(self, iteration: int) -> None:
        """Called when the training has ended with ``iteration``."""
