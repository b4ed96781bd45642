"""Small stages on a device, and what their ranks measure.

If NCCL refuses two ranks on one GPU, gloo sends copies on the host in place of NCCL's messages.
Everything else is the executor of a training, with its tensors on the device. On the CPU the same
copies are made of tensors that are already there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.graph import Channel, channels
from megatron_ext.compile.program.memory import in_bytes, memory_curve
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.registry import choose
from megatron_ext.features.offload.runtime.offload import ActivationOffload
from megatron_ext.runtime.executor import execute
from megatron_ext.runtime.messages.batched import BatchedTransport, PipelineGroup
from megatron_ext.runtime.messages.channels import Channels
from megatron_ext.runtime.messages.transport import Boundary, Transport
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.stage_io import Messages
from megatron_ext.runtime.weight_gradients import queue
from megatron_ext.schedule.action import Action, OverlappedPasses
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.problem import P2P, Problem, ScheduleOptions
from megatron_ext.schedule.schedule import is_compute
from tests.helpers.stages import LinearStage, SplitLinear, world
from tests.helpers.storages import LiveStorages, messages_on_their_way

# layers of a stage; they are many, so that the temporary memory of one layer counts little
LAYERS = 24
# Shapes of the tensors between stages. On a GPU they are so large that the allocator's rounding
# counts little.
SHAPES = {"cpu": (32, 16), "cuda": (2048, 512)}
TOLERANCE = 0.1  # share by which the temporary tensors of a layer may increase a peak


def device_of(kind: str) -> torch.device:
    """Return the device as its tensors name it: ``cuda`` is not equal to ``cuda:0``."""
    return torch.device(kind, 0) if kind == "cuda" else torch.device(kind)


@dataclass(frozen=True)
class HostCopy:
    """A message by way of the host. ``to`` is the tensor of a receive."""

    work: dist.Work
    host: Tensor  # copy on the host, which must live until the message has moved
    to: Tensor | None

    def wait(self) -> None:
        self.work.wait()
        if self.to is not None:
            self.to.copy_(self.host)


def host_like(tensor: Tensor) -> Tensor:
    """Return memory on the host that torch did not allocate: on the CPU, `Gauge` counts all memory
    of torch as a rank's."""
    data = torch.from_numpy(np.empty(tensor.numel() * tensor.element_size(), np.uint8))
    return data.view(tensor.dtype).view(tensor.shape)


def on_host(tensor: Tensor) -> Tensor:
    return host_like(tensor).copy_(tensor)


class HostChannels(Channels):
    """`Channels` whose messages go by way of the host."""

    def send(self, channel: Channel, tensor: Tensor) -> Any:
        host = on_host(tensor)
        return HostCopy(super().send(channel, host), host, None)

    def receive(self, channel: Channel, tensor: Tensor) -> Any:
        host = host_like(tensor)
        return HostCopy(super().receive(channel, host), host, tensor)


class HostGroup(PipelineGroup):
    """`PipelineGroup` whose batches go by way of the host."""

    def start(self, messages: Sequence[tuple[Channel, Tensor]]) -> list[Any]:
        ways = [way for way, _ in messages]
        hosts = [(on_host if way.sender == self.rank else host_like)(t) for way, t in messages]
        works = super().start(list(zip(ways, hosts, strict=True)))
        return [
            HostCopy(work, host, tensor if way.receiver == self.rank else None)
            for work, host, (way, tensor) in zip(works, hosts, messages, strict=True)
        ]


@dataclass
class DeepStage(LinearStage):
    """A stage of `LAYERS` linear layers on ``device``, each of which keeps its input for W."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    shape: tuple[int, int] = (32, 16)  # shape of the tensors between stages: samples, width
    activate: Callable[[Tensor], Tensor] = torch.tanh

    def __post_init__(self) -> None:
        super().__post_init__()
        self._whole: int | None = None  # microbatch whose full backward pass (B) runs
        draw = torch.Generator().manual_seed(self.number)
        width = self.shape[1]
        drawn = torch.randn(LAYERS, width, width, generator=draw) / width**0.5
        self.weights = [torch.nn.Parameter(weight.to(self.device)) for weight in drawn]
        for weight in self.weights:
            weight.grad = torch.zeros_like(weight)

    @property
    def gradients(self) -> list[Tensor]:
        return [weight.grad for weight in self.weights if weight.grad is not None]

    def output(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = SplitLinear.apply(self.activate(x), weight)
            if x.requires_grad:
                x.register_hook(self._behind_a_layer)
        return x

    def backward(self, microbatch: int, dy: Tensor | None) -> Tensor | None:
        """Run B as Megatron's layers do: each computes its weight gradient at once. B used to
        compute all weight gradients at its end, and so stored the bytes of another microbatch,
        which no prediction counted."""
        self._whole = microbatch
        dx = super().backward(microbatch, dy)
        self._whole = None
        return dx

    def _behind_a_layer(self, gradient: Tensor) -> None:
        if self._whole is not None:
            queue.run_so_far(self.number, self._whole)

    def sample(self, microbatch: int) -> Tensor:
        draw = torch.Generator().manual_seed(microbatch)
        drawn = torch.randn(self.shape, generator=draw)
        return drawn.to(self.device).requires_grad_()


class Gauge:
    """Counts the bytes of tensors that were allocated since `open` was last called.

    On a GPU these are the allocator's bytes, with those that the host has freed while a stream
    still uses them, and the peak is that of any moment. On the CPU they are counted at the starts
    and ends of passes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._live: LiveStorages | None = None
        self._most = self._before = 0

    @contextmanager
    def open(self) -> Iterator[None]:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = _active("current")
            yield
            return
        self._most = 0
        with LiveStorages() as self._live:
            yield

    def now(self) -> int:
        if self._live is None:
            return _active("current") - self._before
        return sum(self._live.sizes().values())

    def look(self) -> None:
        if self._live is not None:
            self._most = max(self._most, self.now())

    def peak(self) -> int:
        if self._live is None:
            return _active("peak") - self._before
        return self._most


def _active(figure: str) -> int:
    """Return the allocator's active bytes: those that are allocated, and those that were freed
    while a stream, such as one of NCCL's, used them (`Tensor.record_stream`)."""
    return int(torch.cuda.memory_stats()[f"active_bytes.all.{figure}"])


class GaugingRecorder(Recorder):
    """Reads the gauge before and after each pass."""

    def __init__(self, rank: int, gauge: Gauge) -> None:
        super().__init__(rank)
        self._gauge = gauge

    @contextmanager
    def computing(self, action: Action | OverlappedPasses) -> Iterator[None]:
        self._gauge.look()
        with super().computing(action):
            yield
        self._gauge.look()


@dataclass(frozen=True)
class Seen:
    """Findings of a rank. ``held`` are, by stage, the bytes from F to I and from I to W. ``left``
    are the bytes offloaded to the host."""

    held: dict[int, tuple[int, int]]
    peak: int
    gradients_are_stocks: bool
    left: int


def on_rank(
    rank: int,
    program: Program,
    device: torch.device,
    shape: tuple[int, int],
    by_host: bool = True,
    compiles: bool = False,
) -> Seen:
    """Run two steps of ``program``; the first one fills the libraries' caches.

    ``by_host``: messages go by way of the host, otherwise from device to device. ``compiles``:
    torch compiles an activation in the first F, while messages are under way.
    """
    activate = compiled_tanh(device) if compiles else torch.tanh
    gauge = Gauge(device)
    placement = program.schedule.placement

    def make(number: int) -> DeepStage:
        return DeepStage(number, placement.stages, device=device, shape=shape, activate=activate)

    for _ in range(2):
        held = {number: bytes_held(make(number), gauge) for number in placement.stages_of[rank]}
    torch.compiler.reset()  # drops compiled code, so that the first step compiles
    recorder = GaugingRecorder(rank, gauge)
    boundary = Boundary(shape, torch.float32)
    transport_of = connect(program, device, boundary, recorder, by_host)
    offload = ActivationOffload(rank, device)
    row = program.schedule.rows[rank]
    for _ in range(2):
        stages = {number: make(number) for number in placement.stages_of[rank]}
        with gauge.open():
            offloaded = offload.step(row)
            execute(program, stages, transport_of(), recorder, [offloaded], context=offloaded)
        peak = gauge.peak()
    left = offload.bytes_left.total()
    return Seen(held, peak, gradients_are_stocks(stages, program, make), left)


def compiled_tanh(device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return a compiled tanh. On the CPU it is compiled without Inductor, whose compiler would take
    longer than everything else."""
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    compiled: Callable[[Tensor], Tensor] = torch.compile(torch.tanh, backend=backend)
    return compiled


def connect(
    program: Program, device: torch.device, boundary: Boundary, recorder: Recorder, by_host: bool
) -> Callable[[], Messages]:
    """Return a function that creates the transport of a step."""
    if program.problem.options.p2p is P2P.BATCHED:
        group = (HostGroup if by_host else PipelineGroup)(world(), device)
        return lambda: BatchedTransport(group, boundary, program, recorder)
    make = HostChannels if by_host else Channels
    ways = make(world(), channels(program.schedule), device)
    return lambda: Transport(ways, boundary, program.schedule.placement, recorder)


def bytes_held(stage: DeepStage, gauge: Gauge) -> tuple[int, int]:
    """Return the bytes of one microbatch from F to I, and from I to W."""
    first, last = stage.number == 0, stage.number == stage.stages - 1
    with gauge.open():
        x = None if first else torch.ones(stage.shape, device=stage.device).requires_grad_()
        stage.forward(0, x)
        del x
        if not last:
            stage.output_sent(0)
        activation = gauge.now()
        stage.backward_input(0, None if last else torch.ones(stage.shape, device=stage.device))
        weight_inputs = gauge.now()
        stage.backward_weight(0)
    return activation, weight_inputs


def gradients_are_stocks(
    stages: Mapping[int, DeepStage], program: Program, make: Callable[[int], DeepStage]
) -> bool:
    """Return whether the gradients of ``stages`` are bitwise equal to those of a single process,
    which runs one microbatch after the other through all stages."""
    alone = [make(number) for number in range(program.schedule.placement.stages)]
    for microbatch in range(program.problem.microbatches):
        x: Tensor | None = None
        for stage in alone:
            x = stage.forward(microbatch, x).detach().requires_grad_()
        dy: Tensor | None = None
        for stage in reversed(alone):
            dy = stage.backward(microbatch, dy)
    return all(
        torch.equal(got, expected)
        for number, stage in stages.items()
        for got, expected in zip(stage.gradients, alone[number].gradients, strict=True)
    )


def program_of(spec: str, ranks: int, p2p: P2P) -> Program:
    resolved = choose(spec)
    placement = resolved.place(ranks)
    return build_program(
        resolved,
        Problem(
            placement, 2 * ranks, uniform(placement, 10, 12, 8, 1), options=ScheduleOptions(p2p=p2p)
        ),
    )


def check(seen: Sequence[Seen], program: Program, device: str) -> None:
    """Assert that ``seen``, by rank, has the gradients of one process and the simulator's peaks,
    and print the peaks."""
    assert all(rank.gradients_are_stocks for rank in seen)
    expected = expected_peaks(program, seen, boundary_bytes(device))
    name, p2p = program.schedule.name, program.problem.options.p2p
    for rank, (result, peak) in enumerate(zip(seen, expected, strict=True)):
        print(f"{name}, {p2p}, {device}, rank {rank} of {len(seen)}: {result.peak} of {peak:.0f}")
    differences = relative_errors([rank.peak for rank in seen], expected)
    assert max(map(abs, differences)) <= TOLERANCE, differences


def relative_errors(measured: Sequence[float], expected: Sequence[float]) -> list[float]:
    return [got / wanted - 1 for got, wanted in zip(measured, expected, strict=True)]


def boundary_bytes(device: str) -> int:
    """Return the bytes of a tensor between two stages."""
    samples, width = SHAPES[device]
    return 4 * samples * width


def expected_peaks(program: Program, seen: Sequence[Seen], boundary: int) -> list[float]:
    """Return the simulator's peaks, from the bytes that stages hold of one microbatch, plus the
    messages under way."""
    held = {number: figures for result in seen for number, figures in result.held.items()}
    per_stage = [held[number] for number in range(program.schedule.placement.stages)]
    costs = program.problem.costs.with_passes(
        held_bytes={
            Held.ACTIVATION: tuple(float(activation) for activation, _ in per_stage),
            Held.WEIGHT_INPUTS: tuple(float(inputs) for _, inputs in per_stage),
        }
    )
    peaks = []
    for row in program.schedule.rows:
        moving = messages_on_their_way(row, program.schedule.placement)
        at_passes = [n for action, n in zip(row, moving, strict=True) if is_compute(action)]
        curve = memory_curve(row, in_bytes(costs))
        peaks.append(max(a + boundary * n for a, n in zip(curve, at_passes, strict=True)))
    return peaks
