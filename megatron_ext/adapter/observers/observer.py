"""The interface of what watches training steps: it is called before and after each."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from megatron_ext.adapter.programs import Shape
from megatron_ext.adapter.splitting import Split
from megatron_ext.adapter.step.call import Call
from megatron_ext.adapter.step.connections import Connections
from megatron_ext.runtime.messages.transport import Boundary
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.slices.running_slice import Span
from megatron_ext.runtime.vocabulary.shard import VocabularyShard
from megatron_ext.schedule.program.verify import Program


@dataclass(frozen=True)
class ObservedStep:
    """One training step on one rank, of ours or of stock's: what those who watch both may know.

    Attributes:
        pipeline: the group of its ranks.
        program: whose passes it runs, in their order.
        recorder: notes when they run.
    """

    pipeline: dist.ProcessGroup
    program: Program
    recorder: Recorder


@dataclass(frozen=True)
class Step(ObservedStep):
    """One step of ours on one rank.

    Attributes:
        call: asks for it.
        connections: to the other ranks.
        shape: of its microbatches.
        boundary: what passes between stages, with its shape.
        shard: of a divided vocabulary.
        split: which weight gradients wait for W passes.
        spans: of the slices of a sequence; none where microbatches are whole.
    """

    call: Call
    connections: Connections
    shape: Shape
    boundary: Boundary
    shard: VocabularyShard | None
    split: Split
    spans: tuple[Span, ...]


class StepObserver[Seen: ObservedStep]:
    """Watches training steps, and changes nothing of what they compute.

    One that takes an `ObservedStep` can watch stock's steps too.
    """

    def begin(self, step: Seen) -> None:
        """Called before the passes."""

    def end(self, step: Seen) -> None:
        """Called after the passes and the reductions, but not after a step that has failed."""

    def finish(self, iteration: int) -> None:
        """Called when the training has ended with ``iteration``."""
