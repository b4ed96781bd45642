"""Small stages of real tensors, and schedules for them: tests of the runtime without Megatron."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.graph import Channel, channels
from megatron_ext.compile.program.speculation import settles_at
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.registry import ResolvedSpec, Traits
from megatron_ext.features.offload.runtime.offload import ActivationOffload
from megatron_ext.features.post_validation.runtime.actions import Validation
from megatron_ext.runtime.executor import execute
from megatron_ext.runtime.host.copies import HostCopies
from megatron_ext.runtime.messages.batched import BatchedTransport, PipelineGroup
from megatron_ext.runtime.messages.channels import Channels
from megatron_ext.runtime.messages.transport import Boundary, Transport
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.stage import Backward
from megatron_ext.runtime.weight_gradients import queue
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.kinds import RULES, Where
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import P2P, Offload, Problem, Recompute, ScheduleOptions
from megatron_ext.schedule.schedule import Schedule, is_compute, recomputed
from megatron_ext.schedule.schedule_csv import from_csv, to_csv

WIDTH = 4
CPU = torch.device("cpu")

# --- schedules


def v_placement(ranks: int) -> Placement:
    """Return the V placement on ``ranks``, which opens on the last rank."""
    down = tuple(reversed(range(ranks)))
    return Placement("v", down + down[::-1])


def loop_placement(ranks: int) -> Placement:
    """Return the loop placement with two chunks a rank. On one rank, both stages are on that
    rank."""
    return Placement("loop", tuple(range(ranks)) * 2)


def greedy(placement: Placement, microbatches: int, splits: bool) -> Schedule:
    """Return the schedule in which each rank always takes a pass that is ready: a backward before a
    forward before a W."""
    kinds = [Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT] if splits else [Kind.FULL_BACKWARD]
    waiting = [
        Action(stage, kind, microbatch)
        for kind in (kinds[0], Kind.FORWARD, *kinds[1:])
        for microbatch in range(microbatches)
        for stage in reversed(range(placement.stages))
    ]
    done: set[Action] = set()
    rows: list[list[Action]] = [[] for _ in range(placement.ranks)]
    while waiting:
        taken: dict[int, Action] = {}
        for action in waiting:
            rank = placement.rank_of[action.stage]
            if rank not in taken and _is_ready(action, done, placement.stages):
                taken[rank] = action
        for rank, action in taken.items():
            rows[rank].append(action)
            waiting.remove(action)
            done.add(action)
    return Schedule("greedy", placement, tuple(map(tuple, rows)))


def _is_ready(action: Action, done: set[Action], stages: int) -> bool:
    """Return whether the inputs of a pass have been computed."""
    stage, kind, microbatch = action
    if kind is Kind.FORWARD:
        return stage == 0 or Action(stage - 1, Kind.FORWARD, microbatch) in done
    if kind is Kind.BACKWARD_WEIGHT:
        return Action(stage, Kind.BACKWARD_INPUT, microbatch) in done
    gradients = (Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD)
    return Action(stage, Kind.FORWARD, microbatch) in done and (
        stage == stages - 1 or any(Action(stage + 1, k, microbatch) in done for k in gradients)
    )


def problem_for(placement: Placement, microbatches: int, forward_only: bool = False) -> Problem:
    """Return a problem with equal passes, in which copies to and from the host are faster than a
    pass."""
    copies = [0.5 / placement.chunks] * placement.stages
    costs = uniform(placement, 1.0, 1.0, 1.0).with_host(copies, copies)
    return Problem(placement, microbatches, costs, forward_only=forward_only)


def program_for(
    resolved: ResolvedSpec,
    ranks: int,
    microbatches: int,
    forward_only: bool = False,
    p2p: P2P = P2P.ASYNC,
    offload: Offload = Offload.NONE,
    steps_overlap: bool = False,
    recompute: Recompute = Recompute(),  # noqa: B008  # frozen
    pairs: bool = False,
) -> Program:
    problem = problem_for(resolved.place(ranks), microbatches, forward_only)
    options = ScheduleOptions(
        p2p=p2p,
        activation_offload=offload,
        recompute=recompute,
        steps_overlap=steps_overlap,
        pairs=pairs,
    )
    return build_program(resolved, replace(problem, options=options))


def as_file(schedule: Schedule) -> ResolvedSpec:
    """Return ``schedule`` written to CSV and read from it, with its placement taken from the
    table."""
    read = from_csv(to_csv(schedule), schedule.name)
    return ResolvedSpec(
        schedule.name,
        lambda ranks: read.placement,
        lambda problem: read,
        Traits(splits_backward=True),
    )


# --- stages


class SplitLinear(torch.autograd.Function):
    """A linear layer whose weight gradient waits in the queue for the W pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: torch.nn.Parameter) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        dy_t, x = dy.t().detach(), x.detach()
        queue.put(ctx.weight, partial(torch.matmul, dy_t, x), [dy_t, x])
        return dy @ ctx.weight, None


@dataclass
class LinearStage:
    """A stage that computes ``y = tanh(x) W^T + b``. The first stage creates its own x, and the
    last one computes a loss from y.

    Attributes:
        data: number that selects the data, so that two pipelines can have different data.
        varies: whether the number of samples differs by microbatch.
        events: list to which it appends what it runs, in order.
        faults: function to call when it comes to an action.
        recomputed: the microbatches that have an R in the next step.
    """

    number: int
    stages: int
    data: int = 0
    varies: bool = False
    events: list[str] = field(default_factory=list)
    faults: Mapping[Action, Callable[[], None]] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    recomputed: Collection[int] = ()

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(self.number)
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=draw))
        self.bias = torch.nn.Parameter(torch.randn(WIDTH, generator=draw))
        # input and output of F or R, until the backward pass
        self._between: dict[int, tuple[Tensor | None, Tensor]] = {}
        # inputs of microbatches between their F and their R
        self._checkpointed: dict[int, Tensor | None] = {}
        self._unsent: dict[int, Tensor] = {}

    @property
    def gradients(self) -> list[Tensor]:
        gradients = [self.weight.grad, self.bias.grad]
        return [gradient for gradient in gradients if gradient is not None]

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor:
        self._begin(Kind.FORWARD, microbatch)
        assert (x is None) == (self.number == 0)
        again = microbatch in self.recomputed
        with torch.set_grad_enabled(torch.is_grad_enabled() and not again):
            y = self._run(microbatch, x)
        if self.number < self.stages - 1:
            self._unsent[microbatch] = y
        if again:
            self._checkpointed[microbatch] = x
        elif torch.is_grad_enabled():
            self._between[microbatch] = x, y
        return y

    def recompute(self, microbatch: int) -> None:
        self._begin(Kind.RECOMPUTE, microbatch)
        x = self._checkpointed.pop(microbatch)
        y = self._run(microbatch, x)
        if self.number < self.stages - 1:
            y.data = y.data.new_empty(1)
        self._between[microbatch] = x, y

    def _run(self, microbatch: int, x: Tensor | None) -> Tensor:
        y = self.output(self.sample(microbatch) if x is None else x)
        if self.number == self.stages - 1:
            y = y.square().mean()
            self.losses[microbatch] = y.detach()
        return y

    def output(self, x: Tensor) -> Tensor:
        y: Tensor = SplitLinear.apply(torch.tanh(x), self.weight) + self.bias
        return y

    def backward(self, microbatch: int, dy: Tensor | None) -> Tensor | None:
        self._begin(Kind.FULL_BACKWARD, microbatch)
        dx = self._input_gradient(microbatch, dy)
        queue.run(self.number, microbatch)
        return dx

    def backward_input(self, microbatch: int, dy: Tensor | None) -> Tensor | None:
        self._begin(Kind.BACKWARD_INPUT, microbatch)
        return self._input_gradient(microbatch, dy)

    def overlapped_forward(
        self, microbatch: int, x: Tensor | None, backward: Backward
    ) -> tuple[Tensor, Tensor | None]:
        return self.forward(microbatch, x), backward.run()

    def backward_weight(self, microbatch: int) -> None:
        self._begin(Kind.BACKWARD_WEIGHT, microbatch)
        queue.run(self.number, microbatch)

    def output_sent(self, microbatch: int) -> None:
        """Free the data of the output as Megatron does. gloo would abort if the output were still
        being sent."""
        output = self._unsent.pop(microbatch)
        output.data = output.data.new_empty(1)

    def gradients_complete(self) -> None:
        self.events.append(f"{self.number} complete")

    def forget(self) -> None:
        self.events.append(f"{self.number} forget")
        self._between.clear()
        self._checkpointed.clear()
        self._unsent.clear()

    def is_empty(self) -> bool:
        """Return whether nothing is stored for a later pass."""
        return not (self._between or self._checkpointed or self._unsent)

    def _begin(self, kind: Kind, microbatch: int) -> None:
        action = Action(self.number, kind, microbatch)
        self.events.append(str(action))
        self.faults.get(action, lambda: None)()

    def sample(self, microbatch: int) -> Tensor:
        draw = torch.Generator().manual_seed(1000 * self.data + microbatch)
        samples = 2 + microbatch % 3 if self.varies else 3
        return torch.randn(samples, WIDTH, generator=draw).requires_grad_()

    def _input_gradient(self, microbatch: int, dy: Tensor | None) -> Tensor | None:
        x, y = self._between.pop(microbatch)
        with queue.collecting(self.number, microbatch):
            # The engine is called directly, as torch.autograd.backward would compare dy's shape
            # with that of y, which was freed.
            torch.autograd.Variable._execution_engine.run_backward(
                (y,),
                (torch.ones_like(y) if dy is None else dy,),
                False,
                False,
                (),
                allow_unreachable=True,
                accumulate_grad=True,
            )
        return None if x is None else x.grad


# --- pipelines


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


class CountingTransport:
    """Records the calls of a transport."""

    def __init__(self, transport: Transport | BatchedTransport, events: list[str]) -> None:
        self.transport = transport
        self.rank = transport.rank
        self.events = events
        self.read: list[Action] = []

    def send(self, action: Action, tensor: Tensor) -> None:
        self.events.append(str(action))
        self.transport.send(action, tensor)

    def wait_sent(self, send: Action) -> None:
        wait = {Kind.SEND_F: Kind.WAIT_F, Kind.SEND_B: Kind.WAIT_B}[send.kind]
        self.events.append(str(send._replace(kind=wait)))
        self.transport.wait_sent(send)

    def receive(self, action: Action) -> None:
        self.events.append(str(action))
        self.transport.receive(action)

    def received(self, action: Action) -> Tensor:
        self.read.append(action)
        return self.transport.received(action)

    def drain(self) -> None:
        self.events.append("drop")
        self.transport.drain()

    def abandon(self) -> None:
        self.transport.abandon()

    def is_empty(self) -> bool:
        return self.transport.is_empty()


class InOrderGroup(PipelineGroup):
    """A process group that is as strict as NCCL: its batches of messages run one after the other,
    and a batch has one work for all of its messages."""

    # PipelineGroup.start as it is at import, in case a test replaces it later.
    _start_at_once = PipelineGroup.start

    def __init__(self, pipeline: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(pipeline, device)
        self._one_by_one = ThreadPoolExecutor(max_workers=1)

    def start(self, messages: Sequence[tuple[Channel, Tensor]]) -> list[Any]:
        def move() -> None:
            for work in self._start_at_once(messages):
                work.wait()

        return [_Started(self._one_by_one.submit(move))]


class _Started:
    def __init__(self, future: Future[None]) -> None:
        self.future = future

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for the batch, like a work of torch."""
        try:
            self.future.result(None if timeout is None else timeout.total_seconds())
        except TimeoutError as error:
            raise RuntimeError("the batch has not moved") from error


@dataclass
class Pipeline:
    """The stages of this rank in one pipeline, over several steps."""

    program: Program
    group: dist.ProcessGroup
    data: int = 0
    varies: bool = False
    faults: Mapping[Action, Callable[[], None]] = field(default_factory=dict)
    connect: Callable[[dist.ProcessGroup, torch.device], PipelineGroup] | None = None
    copies: HostCopies | None = None

    def __post_init__(self) -> None:
        placement = self.program.schedule.placement
        self.connection = self._connection()
        self.recorder = Recorder(self.group.rank())
        self.offload = ActivationOffload(self.group.rank(), CPU, self.copies)
        self.events: list[str] = []
        self.stages = {
            number: LinearStage(
                number, placement.stages, self.data, self.varies, self.events, self.faults
            )
            for number in placement.stages_of[self.group.rank()]
        }

    def _connection(self) -> Channels | PipelineGroup:
        if self.connect is not None:
            return self.connect(self.group, CPU)
        if self.program.problem.options.p2p is P2P.BATCHED:
            return InOrderGroup(self.group, CPU)
        connection = Channels(self.group, channels(self.program.schedule), CPU)
        if self.varies:
            connection.connect_hosts()
        return connection

    def transport(self, program: Program) -> Transport | BatchedTransport:
        boundary = Boundary(None if self.varies else (3, WIDTH), torch.float32)
        if isinstance(self.connection, PipelineGroup):
            return BatchedTransport(self.connection, boundary, program, self.recorder)
        return Transport(self.connection, boundary, program.schedule.placement, self.recorder)

    def step(
        self, program: Program | None = None, validation: Validation | None = None
    ) -> CountingTransport:
        """Run one step, of another program if one is given. The actions that ran are in
        ``events``."""
        program = program or self.program
        self.events.clear()
        transport = CountingTransport(self.transport(program), self.events)
        row = program.schedule.rows[self.group.rank()]
        for number, stage in self.stages.items():
            stage.recomputed = {m for s, m in recomputed(row) if s == number}
        with torch.set_grad_enabled(not program.problem.forward_only):
            offload = self.offload.step(row)
            execute(
                program,
                self.stages,
                transport,
                self.recorder,
                [offload] if validation is None else [offload, validation],
                context=offload,
            )
        return transport


def expected_events(program: Program, rank: int, begins_again: bool = False) -> list[str]:
    """Return what ``rank`` does in a step: the actions of its row, and the completion of each stage
    after its last weight gradient and after the completion of the rank's later stages.

    If ``begins_again``, the step is restarted after a bad verdict of post-validation on the step
    before. The list then begins with the actions that had run by then and whose results are
    dropped.
    """
    row = program.schedule.rows[rank]
    last = {a.stage: a for a in row if Kind.BACKWARD_WEIGHT in RULES[a.kind].covers}
    unreduced, complete = sorted(last), set[int]()
    events: list[str] = []
    if begins_again:
        events += [str(a) for a in row[: settles_at(row)] if not is_validation(a)]
        events += ["drop", *(f"{s} forget" for s in program.schedule.placement.stages_of[rank])]
    for action in row:
        if is_validation(action):
            continue
        events.append(str(action))
        if is_compute(action) and last.get(action.stage) == action:
            complete.add(action.stage)
            while unreduced and unreduced[-1] in complete:
                events.append(f"{unreduced.pop()} complete")
    return events


def is_validation(action: Action) -> bool:
    """Return whether ``action`` belongs to post-validation, so that no transport and no stage sees
    it."""
    return RULES[action.kind].where is Where.RANK


def alone(pipeline: Pipeline, steps: int = 1) -> list[LinearStage]:
    """Return the stages of ``pipeline`` in this process, with the gradients and losses of ``steps``
    steps without an optimizer."""
    stages = stages_alone(pipeline)
    made = [
        _untrained(len(stages), pipeline.data, pipeline.varies, m)
        for m in range(pipeline.program.problem.microbatches)
    ]
    stages[-1].losses.update(enumerate(loss for _, loss in made))
    for _ in range(steps):
        _add_up(stages, pipeline.program, [gradients for gradients, _ in made])
    return stages


@functools.cache
def _untrained(
    count: int, data: int, varies: bool, microbatch: int
) -> tuple[list[list[Tensor]], Tensor]:
    """Return the gradients of one microbatch, stage after stage, and its loss, before the first
    step. They are computed once for all programs that a rank compares with them."""
    stages = [LinearStage(n, count, data, varies) for n in range(count)]
    return list(_one_microbatch(stages, microbatch)), stages[-1].losses[microbatch]


def stages_alone(pipeline: Pipeline) -> list[LinearStage]:
    """Return all stages of ``pipeline``, as they are before the first step."""
    count = pipeline.program.schedule.placement.stages
    return [LinearStage(n, count, pipeline.data, pipeline.varies) for n in range(count)]


def add_gradients(stages: list[LinearStage], program: Program) -> None:
    """Run a step of ``stages`` in one process, one microbatch after the other."""
    microbatches = range(program.problem.microbatches)
    _add_up(stages, program, [list(_one_microbatch(stages, m)) for m in microbatches])


def _add_up(
    stages: list[LinearStage], program: Program, per_microbatch: Sequence[list[list[Tensor]]]
) -> None:
    """Add the gradients of each of ``stages``, given by microbatch in ``per_microbatch``. They are
    added in the order of the program: ascending for this project's families, any order for a random
    program."""
    placement = program.schedule.placement
    for stage in stages:
        row = program.schedule.rows[placement.rank_of[stage.number]]
        for parameter, kind, index in (
            (stage.weight, Kind.BACKWARD_WEIGHT, 0),
            (stage.bias, Kind.BACKWARD_INPUT, 1),
        ):
            for action in row:
                if action.stage == stage.number and kind in RULES[action.kind].covers:
                    gradient = per_microbatch[action.microbatch][stage.number][index]
                    total = parameter.grad
                    parameter.grad = gradient if total is None else total + gradient


def _one_microbatch(stages: list[LinearStage], microbatch: int) -> Iterator[list[Tensor]]:
    """Yield the gradients of one microbatch alone, stage after stage."""
    copies = [copy_of(stage) for stage in stages]
    x: Tensor | None = None
    for stage in copies:
        y = stage.forward(microbatch, x)
        x = y.detach().requires_grad_()
    dy: Tensor | None = None
    for stage in reversed(copies):
        dy = stage.backward(microbatch, dy)
    for stage in copies:
        yield stage.gradients


def copy_of(stage: LinearStage) -> LinearStage:
    """Return a stage with the same parameters and no gradients; its losses are added to those of
    ``stage``."""
    copy = replace(stage, events=[], losses=stage.losses)
    with torch.no_grad():
        copy.weight.copy_(stage.weight)
        copy.bias.copy_(stage.bias)
    return copy
