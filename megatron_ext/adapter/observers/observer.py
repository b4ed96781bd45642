"""Interface of observers of training steps, which are called before and after each step.

Traces, metrics and measured costs all need the begin and the end of each step, and no result may
depend on them. Observers get the facts about a step as a `Step`, or as a `StocksStep` if Megatron's
own functions run the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from megatron_ext.adapter.programs import BatchShape
from megatron_ext.adapter.splitting import Split
from megatron_ext.adapter.step.call import Call
from megatron_ext.adapter.step.connections import Connections
from megatron_ext.adapter.step.step_hooks import StepHooks
from megatron_ext.compile.program.verify import Program
from megatron_ext.observe.fitted_parts import ModelParts
from megatron_ext.runtime.messages.transport import Boundary
from megatron_ext.runtime.recorder import Recorder


@dataclass(frozen=True)
class ObservedStep:
    """Training step on one rank as observers see it, run by our runtime or by Megatron.

    Attributes:
        pipeline: process group of the pipeline's ranks.
        program: the step's passes, in the order in which they run.
        recorder: records when each pass runs.
    """

    pipeline: dist.ProcessGroup
    program: Program
    recorder: Recorder


@dataclass(frozen=True)
class StocksStep(ObservedStep):
    """Training step on one rank that Megatron's own schedule runs.

    Attributes:
        parts: the parts of the model on each stage; None if not known.
    """

    parts: ModelParts | None


@dataclass(frozen=True)
class Step(ObservedStep):
    """Training step on one rank that our runtime runs.

    Attributes:
        call: Megatron's call of the schedule function for this step.
        connections: connections to the other pipeline ranks.
        shape: micro-batch size and sequence length.
        boundary: the tensor that passes between stages, with its shape.
        split: the weight gradients that wait for W passes.
        hooks: the hooks of the features that take part in the step.
    """

    call: Call
    connections: Connections
    shape: BatchShape
    boundary: Boundary
    split: Split
    hooks: tuple[StepHooks, ...]


class StepObserver[Seen: ObservedStep]:
    """Observer of training steps, which changes no result.

    An observer of `ObservedStep` can watch Megatron's own steps too.
    """

    def begin(self, step: Seen) -> None:
        """Observe that a step is about to run its passes."""

    def end(self, step: Seen) -> None:
        """Observe that a step has run its passes and reductions; not called if the step failed."""

    def finish(self, iteration: int) -> None:
        """Observe that the training has ended with ``iteration``."""


# Observers of every training step of this process, under a schedule of megatron_ext or Megatron's
# own. A rehearsal adds an observer.
of_all_steps: list[StepObserver[ObservedStep]] = []
