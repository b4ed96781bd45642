"""Contestants of the benchmark on emulated clocks: our executor, and torch's schedules.

Ours and torch's executors are measured in the same way: the same emulated passes, on the same
ranks, with the ideal step of each order computed next to the measured one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import pipelining

from megatron_ext.compile.build import build_program, complete
from megatron_ext.compile.program.graph import channels
from megatron_ext.compile.program.simulate import step_seconds
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.registry import ResolvedSpec, choose
from megatron_ext.runtime.executor import execute
from megatron_ext.runtime.messages.peers import peers
from megatron_ext.runtime.messages.transport import Boundary, Transport
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.stage import Backward
from megatron_ext.runtime.weight_gradients import queue
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.problem import Problem, ScheduleOptions, VocabularyParallel
from megatron_ext.schedule.schedule import Schedule
from megatron_ext.schedule.schedule_csv import from_csv
from scripts.benchmarks.emulated import (
    DTYPE,
    SHAPE,
    Contender,
    EmulatedChunk,
    EmulatedValidation,
    EmulatedVocabulary,
    as_one,
    data,
    in_seconds,
)

CPU = torch.device("cpu")
NO_OPTIONS = ScheduleOptions()
TORCH = {
    "1F1B": pipelining.Schedule1F1B,
    "Interleaved1F1B": pipelining.ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": pipelining.ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": pipelining.ScheduleZBVZeroBubble,
    "DualPipeV": pipelining.ScheduleDualPipeV,
}


def program_of(
    resolved: ResolvedSpec,
    ranks: int,
    microbatches: int,
    costs: str,
    options: ScheduleOptions = NO_OPTIONS,
) -> Program:
    """Return the program of ``resolved`` for emulated ``costs``, which are in milliseconds.

    Messages are free in it.
    """
    placement = resolved.place(ranks)
    seconds = in_seconds(costs, placement)
    return build_program(resolved, Problem(placement, microbatches, seconds, options=options))


def ideal_of(program: Program) -> float:
    """Return the seconds of an emulated step of ``program`` without overhead.

    This is the makespan or, if steps overlap, about the span.
    """
    return step_seconds(program, program.problem.costs)


def _passes(program: Program) -> int:
    """Return the number of passes of a rank in a step."""
    return len(program.schedule.compute_rows[0])


class EmulatedStage:
    """`RunnableStage` around an `EmulatedChunk`. The last stage may compute a loss."""

    def __init__(self, number: int, chunk: EmulatedChunk, has_loss: bool) -> None:
        self.number = number
        # Input and output of F by microbatch, until the backward pass.
        self.between: dict[int, tuple[Tensor | None, Tensor]] = {}
        self._chunk = chunk
        self._has_loss = has_loss

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor:
        return self._run(Kind.FORWARD, microbatch, x)

    def recompute(self, microbatch: int) -> None:
        x, _ = self.between.pop(microbatch)
        self._run(Kind.RECOMPUTE, microbatch, x)

    def overlapped_forward(
        self, microbatch: int, x: Tensor | None, backward: Backward
    ) -> tuple[Tensor, Tensor | None]:
        kind = Kind.FULL_BACKWARD if backward.is_full else Kind.BACKWARD_INPUT
        assert isinstance(backward.stage, EmulatedStage)
        other = Action(backward.stage.number, kind, backward.microbatch)
        both = self._chunk.costs.of_overlapped(Action(self.number, Kind.FORWARD, microbatch), other)
        with as_one(both):
            return self.forward(microbatch, x), backward.run()

    def backward_input(self, microbatch: int, dy: Tensor | None) -> Tensor | None:
        x, y = self.between.pop(microbatch)
        with queue.collecting(self.number, microbatch):
            torch.autograd.backward(y, dy)
        return None if x is None else x.grad

    def backward_weight(self, microbatch: int) -> None:
        queue.run(self.number, microbatch)

    def backward(self, microbatch: int, dy: Tensor | None) -> Tensor | None:
        dx = self.backward_input(microbatch, dy)
        self.backward_weight(microbatch)
        return dx

    def output_sent(self, microbatch: int) -> None:
        pass

    def gradients_complete(self) -> None:
        pass

    def forget(self) -> None:
        self.between.clear()

    def _run(self, kind: Kind, microbatch: int, x: Tensor | None) -> Tensor:
        y: Tensor = self._chunk(data() if x is None else x, kind)
        if self._has_loss:
            y = y.mean()
        self.between[microbatch] = x, y
        return y


class EmulatedRank:
    """This process as a rank of an emulated pipeline. Its passes take ``costs``."""

    def __init__(
        self,
        schedule: Schedule,
        costs: Costs,
        stage: Callable[[int, EmulatedChunk, bool], EmulatedStage] = EmulatedStage,
        *,
        has_loss: bool = True,
    ) -> None:
        """Connect the ranks of the emulated pipeline.

        Args:
            schedule: tells which stages this rank has, and to which ranks it sends.
            costs: seconds that each pass sleeps.
            stage: makes a stage from its number, its chunk, and whether it computes the loss.
            has_loss: whether the last stage computes the loss.
        """
        world, self.placement = dist.group.WORLD, schedule.placement
        assert world is not None
        self.world = world
        self.recorder = Recorder(world.rank())
        made = channels(schedule)
        self.channels = peers().channels(world, made, CPU, None, self.recorder)
        self.stages = {
            number: stage(
                number, EmulatedChunk(number, costs), has_loss and self.placement.is_last(number)
            )
            for number in self.placement.stages_of[world.rank()]
        }

    def step(self, program: Program, splits_backward: bool, **others: Any) -> None:
        """Run a step of ``program``; ``others`` are further arguments of `execute`."""
        transport = Transport(self.channels, Boundary(SHAPE, DTYPE), self.placement, self.recorder)
        queue.splitting = splits_backward
        execute(program, self.stages, transport, self.recorder, **others)
        queue.splitting = False


def ours(
    spec: str, ranks: int, microbatches: int, costs: str, options: ScheduleOptions
) -> Contender:
    """Return the contender that runs the schedule ``spec`` by our executor and transport."""
    resolved = choose(spec)
    divides = options.vocab_parallel is not VocabularyParallel.NONE
    program = program_of(resolved, ranks, microbatches, costs, options)
    emulated = EmulatedRank(program.schedule, program.problem.costs, has_loss=not divides)
    world, recorder = emulated.world, emulated.recorder
    shard = EmulatedVocabulary(program, world, recorder) if divides else None
    validation = None
    if options.steps_overlap:
        validation = EmulatedValidation(world, emulated.placement, recorder)

    def step() -> None:
        vocabulary = None if shard is None else shard.step()
        owners = [owner for owner in (vocabulary, validation) if owner is not None]
        emulated.step(program, resolved.traits.splits_backward, others=owners, ends=vocabulary)
        if validation is not None:
            validation.optimizer_step()

    def commit_or_rollback() -> None:
        assert validation is not None
        validation.commit_or_rollback()

    name = f"megatron-ext {spec}" + f", vocabulary {options.vocab_parallel}" * divides
    name += ", in pairs" * options.pairs + ", post-validation" * options.steps_overlap
    ended = commit_or_rollback if options.steps_overlap else None
    return Contender(name, ideal_of(program), _passes(program), step, ended)


def torchs(ranks: int, microbatches: int, costs: str) -> Iterator[Contender]:
    """Yield the contenders of torch.distributed.pipelining's schedules that accept these sizes."""
    for name, schedule_class in TORCH.items():
        try:
            yield _torch_contenders(name, schedule_class, ranks, microbatches, costs)
        except ValueError:
            continue  # interleaved requires m to be a multiple of p, a V requires m >= 2p


def _torch_contenders(
    name: str, schedule_class: type, ranks: int, microbatches: int, costs: str
) -> Contender:
    rank = dist.get_rank()
    one_stage = name == "1F1B"
    # Schedules whose V begins and ends on rank 0, not on the last rank.
    goes_back = name in ("ZBVZeroBubble", "DualPipeV")
    numbers: Sequence[int] = [rank] if one_stage else [rank, rank + ranks]
    if goes_back:
        numbers = [rank, 2 * ranks - 1 - rank]
    total = ranks if one_stage else 2 * ranks
    per_chunk = in_seconds(costs, choose("1f1b" if one_stage else "interleaved").place(ranks))
    stages = []
    for number in numbers:
        stages.append(
            pipelining.PipelineStage(
                EmulatedChunk(number, per_chunk),
                number,
                total,
                CPU,
                input_args=data(),
                output_args=data(),
            )
        )
    schedule = schedule_class(
        stages[0] if one_stage else stages,
        microbatches,
        loss_fn=lambda output, target: output.mean(),
        scale_grads=False,
    )
    if one_stage:
        program = program_of(choose("1f1b"), ranks, microbatches, costs)
    else:
        text = "\n".join(
            ",".join("" if action is None else str(action) for action in schedule.pipeline_order[r])
            for r in range(ranks)
        )
        table = from_csv(text, name)
        seconds = in_seconds(costs, table.placement)
        program = complete(table, Problem(table.placement, microbatches, seconds))
    batch = torch.ones(microbatches, *SHAPE[1:], dtype=DTYPE, requires_grad=True)
    is_first, is_last = 0 in numbers, total - 1 in numbers

    def step() -> None:
        arguments = (batch,) if is_first else ()
        target = {"target": batch, "losses": []} if is_last else {}
        schedule.step(*arguments, **target)

    return Contender(f"torch {name}", ideal_of(program), _passes(program), step)
