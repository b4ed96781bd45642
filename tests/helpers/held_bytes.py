"""Bytes that a rank really holds during a training step, counted action by action.

Every storage counts that an operation created during the step and that is still alive, whatever
keeps it (autograd, the queue of weight gradients, the executor, the model, a leak). On a GPU
`torch.cuda.memory_allocated` says the same, plus the memory from before the step: parameters,
gradient buffers, cached masks. Memory that an action has freed by its end does not count.

Tensors of messages count separately: an output or a gradient from its pass until its send has been
waited for, or until the next stage on the same rank takes it, and a receive from when it is posted
until its pass takes it. The simulator does not know these times.

Offloaded tensors belong to no rank: torch does not allocate their host buffers here.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules as stock

from megatron_ext.adapter.step import passes
from megatron_ext.adapter.step.model_stage import ModelStage
from megatron_ext.compile.program.verify import Program
from megatron_ext.features.offload.runtime import offload as offload_module
from megatron_ext.features.offload.runtime.offload import OffloadedStep
from megatron_ext.runtime.executor import _Execution
from megatron_ext.runtime.messages.transport import Transport
from megatron_ext.runtime.owner import Owner
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.stage_io import PipelineEnds, StageIO
from megatron_ext.runtime.stage_passes import PassContext, StagePasses
from megatron_ext.runtime.weight_gradients import queue
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.kinds import RULES
from megatron_ext.schedule.schedule import is_compute
from tests.helpers.storages import LiveStorages, addresses

Microbatch = tuple[int, int]  # stage, microbatch


@dataclass(frozen=True)
class Sample:
    """Bytes that a rank holds right after ``action``.

    Attributes:
        held: all but tensors of messages.
        on_its_way: outputs, gradients and receives of messages.
        own: the part of ``held`` that belongs to the action's stage and microbatch.
        queued: bytes in the queue of weight gradients for the W pass of this stage and microbatch.
        copied: the part of ``queued`` in inputs of layers that no forward pass created, such as
            copies.
    """

    action: Action
    held: int
    on_its_way: int
    own: int
    queued: int
    copied: int


@dataclass(frozen=True)
class Measured:
    """A step on one rank. ``left_over`` are the bytes that are still held after it, without
    losses."""

    digest: str
    samples: tuple[Sample, ...]
    left_over: int

    @property
    def peak(self) -> int:
        return max(sample.held for sample in self.samples)

    @property
    def peak_on_its_way(self) -> int:
        return max(sample.on_its_way for sample in self.samples)


class _MeasuredExecution:
    """A step of this project's executor that counts bytes after every action."""

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, ModelStage],
        transport: Transport,
        recorder: Recorder,
        offload: OffloadedStep | None,
    ) -> None:
        self.digest = program.digest
        self.stages = stages
        self.transport = transport
        self.stage_io = StageIO(program.schedule.placement, stages, transport)
        owners: list[Owner] = [self.stage_io, StagePasses(stages, self.stage_io, recorder, offload)]
        if offload is not None:
            owners.append(offload)
        self.execution = _Execution(program, transport.rank, stages, recorder, owners)
        self.execution.perform = self.sampled(self.execution.perform)  # type: ignore[assignment]
        self.live = LiveStorages()
        self.samples: list[Sample] = []

    def run(self) -> Measured:
        with self.live:
            self.execution.run()
        del self.execution
        left_over = self.live.sizes().keys() - self.kept_for_megatron()
        sizes = self.live.sizes()
        return Measured(
            self.digest, tuple(self.samples), sum(sizes[address] for address in left_over)
        )

    def sampled(self, perform: Callable[[Action], None]) -> Callable[[Action], None]:
        def performed(action: Action) -> None:
            self.hand_over(action)
            self.live.maker = action
            perform(action)
            self.live.maker = None
            self.samples.append(self.sample(action))

        return performed

    def hand_over(self, action: Action) -> None:
        """From now on count the tensor from the neighbouring stage on this rank as belonging to
        ``action``."""
        stage, _, microbatch = action
        made = []
        if Kind.FORWARD in RULES[action.kind].covers:
            made = [self.stage_io.outputs.get((stage - 1, microbatch))]
        elif Kind.BACKWARD_INPUT in RULES[action.kind].covers:
            made = [self.stage_io.gradients.get((stage + 1, microbatch))]
        for address in addresses(made):
            self.live.maker_of[address] = Action(stage, Kind.FORWARD, microbatch)

    def sample(self, action: Action) -> Sample:
        sizes = self.live.sizes()
        moving = self.on_their_way() & sizes.keys()
        held = sizes.keys() - moving - self.kept_for_megatron()
        whose = (action.stage, action.microbatch)
        owners = self.owners()
        own = [address for address in held if owners[address] == whose]
        inputs, gradients = queued(whose)
        copied = [address for address in inputs if not self.made_by_forward(address)]

        def total(chosen: Iterable[int]) -> int:
            return sum(sizes[address] for address in chosen)

        return Sample(
            action,
            total(held),
            total(moving),
            total(own),
            total((inputs | gradients) & sizes.keys()),
            total(copied),
        )

    def owners(self) -> dict[int, Microbatch | None]:
        """Return the owner of each storage, which is the stage and microbatch that created it.

        The output of a stage always belongs to that stage. So does the tensor of one element that
        replaces it when its memory is freed, even if the next stage on the rank creates that.
        """
        owners: dict[int, Microbatch | None] = {
            address: None if maker is None else (maker.stage, maker.microbatch)
            for address, maker in self.live.maker_of.items()
        }
        for number, stage in self.stages.items():
            for microbatch, (_, y) in stage._between.items():
                if y.numel() == 1:
                    owners |= dict.fromkeys(addresses(y), (number, microbatch))
        return owners

    def made_by_forward(self, address: int) -> bool:
        maker = self.live.maker_of[address]
        return maker is not None and maker.kind in (Kind.FORWARD, Kind.RECOMPUTE, Kind.RECV_F)

    def on_their_way(self) -> set[int]:
        transport = self.transport
        return addresses(
            [
                list(self.stage_io.outputs.values()),
                list(self.stage_io.gradients.values()),
                list(transport._sending.values()),
                list(transport._receiving.values()),
            ]
        )

    def kept_for_megatron(self) -> set[int]:
        """Return the losses and token counts, which a step returns to Megatron, and the random
        states, which are on the host."""
        return addresses(
            [
                [stage.losses, stage.tokens, [call.random_states for _, call, _ in given_up]]
                for stage in self.stages.values()
                for given_up in [stage._checkpointed.values()]
            ]
        )


def queued(whose: Microbatch) -> tuple[set[int], set[int]]:
    """Return the addresses of the storages in the queue of weight gradients: of inputs of layers,
    and of gradients of their outputs."""
    pairs = [use.tensors for uses in queue._pending.get(whose, {}).values() for use in uses.uses]
    return addresses([x for x, *_ in pairs]), addresses([dy for _, *dy in pairs])


def measure_steps(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let ranks that are forked from now on count their bytes, and write the results to ``folder``.

    The first step of a rank, which also fills caches, is not counted. Each later step overwrites
    the results of the one before.
    """

    def execute(
        program: Program,
        stages: Mapping[int, ModelStage],
        transport: Transport,
        recorder: Recorder,
        others: Sequence[Owner],
        ends: PipelineEnds | None,
        context: PassContext | None,
    ) -> None:
        assert ends is None, "the passes of a divided vocabulary are not counted here"
        offloaded = [owner for owner in others if isinstance(owner, OffloadedStep)]
        assert [*others] == offloaded, "steps that begin again are not counted here"
        offload = offloaded[0] if offloaded else None
        assert context is offload
        measured = _MeasuredExecution(program, stages, transport, recorder, offload).run()
        (folder / str(transport.rank)).write_bytes(pickle.dumps(measured))

    monkeypatch.setattr(passes, "execute", but_for_the_first(passes.execute, execute))
    monkeypatch.setattr(offload_module, "SMALL", 0)


def but_for_the_first(run: Callable[..., Any], counted: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``run`` the first time, and ``counted`` from then on."""
    functions = itertools.chain([run], itertools.repeat(counted))
    return lambda *args, **kwargs: next(functions)(*args, **kwargs)


def read_steps(folder: Path, ranks: int) -> list[Measured]:
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(ranks)]


def measure_stock_steps(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Count bytes like `measure_steps`, but for Megatron's own 1F1B, after each forward_step and
    backward_step.

    The output of a pass counts as on its way. So do the tensors that the previous backward pass
    took and returned, which Megatron's local variables keep until the next one.
    """
    run, forward, backward = (
        stock.forward_backward_pipelining_without_interleaving,
        stock.forward_step,
        stock.backward_step,
    )
    lives: list[LiveStorages] = []
    samples: list[Sample] = []
    results: list[Any] = []
    made: dict[str, int] = {"F": 0, "B": 0}
    moving: dict[str, set[int]] = {}

    def look(kind: Kind) -> None:
        if not lives:  # in the first step nothing is counted yet
            return
        rank = parallel_state.get_pipeline_model_parallel_rank()
        action = Action(rank, kind, made[str(kind)])
        made[str(kind)] += 1
        sizes = lives[-1].sizes()
        on_its_way = set().union(*moving.values()) & sizes.keys()
        held = sizes.keys() - on_its_way - addresses(results)
        samples.append(
            Sample(
                action,
                sum(sizes[address] for address in held),
                sum(sizes[address] for address in on_its_way),
                0,
                0,
                0,
            )
        )

    def forward_step(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        results[:] = [args[5]]
        moving["output"] = set() if kwargs["is_last_stage"] else addresses(result[0])
        look(Kind.FORWARD)
        return result

    def backward_step(x: Any, y: Any, dy: Any, config: Any) -> Any:
        dx = backward(x, y, dy, config)
        moving["output"] = set()
        moving["backward"] = addresses([x, dx, dy])
        look(Kind.FULL_BACKWARD)
        return dx

    def step(*args: Any, **kwargs: Any) -> Any:
        samples.clear()
        made.update(F=0, B=0)
        lives[:] = [LiveStorages()]
        with lives[-1]:
            result = run(*args, **kwargs)
        sizes = lives[-1].sizes()
        left_over = sizes.keys() - addresses(result)
        measured = Measured("", tuple(samples), sum(sizes[address] for address in left_over))
        rank = parallel_state.get_pipeline_model_parallel_rank()
        (folder / str(rank)).write_bytes(pickle.dumps(measured))
        return result

    monkeypatch.setattr(stock, "forward_step", forward_step)
    monkeypatch.setattr(stock, "backward_step", backward_step)
    monkeypatch.setattr(stock, run.__name__, but_for_the_first(run, step))


def computing(samples: Iterable[Sample]) -> list[Sample]:
    """Return the samples taken after passes."""
    return [sample for sample in samples if is_compute(sample.action)]
