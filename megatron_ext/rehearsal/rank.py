"""Rehearsal of one rank: its script trains in this process, without the other ranks.

torch's fake process group gives this rank its place, made-up peers (`peers`) send it `Values`, and
an observer notes its passes. Everything else is what the rank does in a real training.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.adapter.observers.observer import (
    ObservedStep,
    StepObserver,
    StocksStep,
    of_all_steps,
)
from megatron_ext.adapter.training_globals import training_global
from megatron_ext.compile.feature_settings import WATCHING
from megatron_ext.compile.program.graph import Channel
from megatron_ext.config import PipelineConfig, flag
from megatron_ext.launch.script import Chosen, launch
from megatron_ext.patches.engine import apply
from megatron_ext.patches.megatron.core.models.common.language_module import last_copy
from megatron_ext.patches.megatron.core.pipeline_parallel import p2p_communication
from megatron_ext.patches.megatron.core.pipeline_parallel.schedules import stock
from megatron_ext.patches.megatron.training.training import rehearsal
from megatron_ext.rehearsal.message_times import MessageTimes
from megatron_ext.rehearsal.rank_command import refuse_untried_settings
from megatron_ext.rehearsal.record import (
    RankRecord,
    RehearsedPass,
    RehearsedStep,
    load_rank_record,
    save_rank_record,
)
from megatron_ext.rehearsal.rehearsed_peers import rehearsed_peers
from megatron_ext.rehearsal.request import (
    BACKWARD,
    FORWARD,
    RECORD,
    PeerValues,
    RankRequest,
    sent_file,
)
from megatron_ext.rehearsal.values import Values
from megatron_ext.runtime.device_progress import DeviceProgress
from megatron_ext.runtime.messages.peers import rehearse_with
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.recording import DeviceClock, HostClock, Recording
from megatron_ext.schedule.action import Kind

# Loss scale with which 16-bit gradients neither overflow nor vanish. Megatron begins with 2 ** 32,
# and skips steps until the scale fits.
LOSS_SCALE = 2.0**12


class RehearsalError(RuntimeError):
    """Raised if a rank cannot be rehearsed. The message names the rank and the step."""


def rehearse_rank(request: RankRequest) -> RankRecord:
    """Train the rank of ``request`` alone, write its record into its folder, and return it.

    The process can do nothing else afterwards: it is forked or started for this one request.

    Raises:
        RehearsalError: the rank cannot be rehearsed, or its values are not finite.
        ValueError: the neighbour's record cannot be read.
    """
    rehearsed = _RehearsedRank(request)
    os.environ.update(request.environment)
    os.environ.update(_environment(request))
    name = ["-m", request.script] if request.is_module else [request.script]
    try:
        if request.is_cpu:
            _use_cpu()
        launch([*name, *request.arguments], _refuse_plan, prepare_rehearsal=rehearsed.prepare)
    except _Ended:
        record = rehearsed.record()
        save_rank_record(record, request.folder / RECORD)
        return record
    except SystemExit as end:  # megatron_ext has printed the user's mistake already
        why = end.__cause__ or RuntimeError(f"its script exits with {end.code}, see its output")
        raise rehearsed.failed(why) from end.__cause__
    except Exception as error:
        raise rehearsed.failed(error) from error
    raise rehearsed.failed(
        RuntimeError("the script has ended before the rehearsal's last timed step")
    )


class _Ended(BaseException):
    """Raised to end the script after the last timed step; no script handles it as an error."""


def _environment(request: RankRequest) -> dict[str, str]:
    """Return the variables that tell the rank its place. Its node has no other rank."""
    devices = {"CUDA_VISIBLE_DEVICES": ""} if request.is_cpu else {}
    return devices | {
        "RANK": str(request.rank),
        "WORLD_SIZE": str(request.world_size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",  # no process listens on this port
    }


def _use_cpu() -> None:
    """Set torch up for the CPU: compile nothing, and use one thread.

    Torch is imported already, so the variables that `patches.cpu` sets for its import come too
    late.
    """
    if torch.cuda.is_available():
        raise ValueError("the rehearsal was to run on the CPU, but torch has already found a GPU")
    torch.compiler.set_stance("force_eager")
    torch.set_num_threads(1)


def _refuse_plan(words: Sequence[str], config: PipelineConfig, world_size: int) -> Chosen:
    raise ValueError(
        f"{flag('schedule')} {config.schedule}: a rehearsed rank does not plan; write the "
        "schedule that `megatron-ext plan` has found"
    )


@dataclass
class _TimedStep:
    """Timed step of a rehearsed rank while it runs.

    Attributes:
        recording: recording of the passes; None until the first pass begins.
        host_times: times of the host's clock at which passes begin and end.
        waited: seconds for which the host has waited for its device between passes.
    """

    recording: Recording | None = None
    host_times: list[float] = field(default_factory=list)
    waited: float = 0.0


class _HostTimes:
    """Mixin of a clock of events that also notes the time of the host at each event.

    The first event of a step starts the times of messages, unless a message was posted before.
    """

    def __init__(self, times: list[float], messages: MessageTimes) -> None:
        self._times, self._messages = times, messages

    def record_event(self) -> Any:
        self._messages.begin_time()
        self._times.append(time.perf_counter())
        return super().record_event()  # type: ignore[misc]


class _TimedHostClock(_HostTimes, HostClock):
    pass


class _TimedDeviceClock(_HostTimes, DeviceClock):
    pass


class _RehearsedRank(StepObserver[ObservedStep]):
    """Observer of a rank that trains alone; it ends the training after the last timed step."""

    def __init__(self, request: RankRequest) -> None:
        if request.warm_up < 1 or request.steps < 1:
            raise RehearsalError(
                f"rank {request.rank}: {request.warm_up} warm-up steps and {request.steps} timed "
                "steps are requested; a rehearsal needs at least one of each"
            )
        neighbour = () if request.neighbour is None else load_rank_record(request.neighbour).sent
        self._request = request
        self._values = Values(
            {sent.direction: sent.rms for sent in neighbour},
            are_zeros=request.values is PeerValues.ZEROS,
            received={name: torch.load(path) for name, path in request.received.items()},
        )
        self._times = MessageTimes(request.replay, is_on_gpu=not request.is_cpu)
        # Numbers of training steps that have begun, and that have ended.
        self._begun = self._trained = 0
        self._timed: _TimedStep | None = None  # the running step, if it is timed
        self._recorder: Recorder | None = None
        self._steps: list[RehearsedStep] = []
        self._pipeline_rank, self._pipeline_ranks = 0, 1
        self._schedule = self._digest = ""
        self._allocated = self._reserved = self._lasting = 0

    def prepare(self, config: PipelineConfig) -> list[str]:
        """Apply the patches of a rehearsal, and return words to add to the script's arguments.

        Raises:
            ValueError: a setting of ``config`` cannot be rehearsed.
        """
        _refuse(config)
        if config.schedule is None:
            # The patches `stock` record the passes of Megatron's own schedule.
            apply(stock.patches(config))
        apply(p2p_communication.patches(self._send, self._receive))
        apply(last_copy.patches())
        apply(rehearsal.patches(self))
        rehearse_with(rehearsed_peers(self._values, self._times, _vocabulary))
        of_all_steps.append(self)
        return ["--fake-process-group", "--initial-loss-scale", str(LOSS_SCALE)]

    def failed(self, error: BaseException) -> RehearsalError:
        """Return ``error`` with the rank, and the step in which it was raised, in its message."""
        where = f"in step {self._begun}" if self._begun else "before its first step"
        what = str(error) or type(error).__name__
        return RehearsalError(f"rank {self._request.rank}, {where}: {what}")

    def record(self) -> RankRecord:
        """Return the record of all steps of this rank."""
        is_on_gpu, pool = torch.cuda.is_available(), self._values.pool_bytes
        return RankRecord(
            rank=self._request.rank,
            world_size=self._request.world_size,
            pipeline_rank=self._pipeline_rank,
            schedule=self._schedule,
            digest=self._digest,
            trained=self._trained,
            steps=tuple(self._steps),
            allocated=self._allocated - pool if is_on_gpu else None,
            reserved=self._reserved - pool if is_on_gpu else None,
            pool=pool,
            lasting=self._lasting - pool if is_on_gpu else None,
            sent=self._values.sent(),
        )

    # ---- Calls from Megatron's training loop (`rehearsal.StepWatcher`)

    def set_up(self, model: Any) -> None:
        """Check the weights of ``model``, and note the loss scale for the gradients of peers.

        Raises:
            ValueError: a weight of the model is frozen. The program depends on which stages are
                trained, and this process does not have the stages of other ranks.
        """
        args = training_global("_GLOBAL_ARGS")
        if args.fp16:
            self._values.loss_scale = args.loss_scale or args.initial_loss_scale
        if not all(weight.requires_grad for chunk in model for weight in chunk.parameters()):
            raise ValueError(
                "models with frozen weights cannot be rehearsed: which stages need no backward "
                "pass depends on the weights of other ranks"
            )
        # The peers of other process groups than the pipeline's are absent, too.
        if args.world_size > args.pipeline_model_parallel_size:
            _refuse_uninitialised()

    def step(self, run: Callable[[], Any], model: Any) -> Any:
        """Call ``run`` for one training step, and end the training after the last timed one."""
        self._begun += 1
        is_timed = self._begun > self._request.warm_up
        self._times.begin_step(is_timed=is_timed)
        if is_timed:
            self._timed = _TimedStep()
            self._begin_counting()
        hands_on = self._request.values is PeerValues.REAL
        if hands_on and self._begun == self._request.warm_up:
            self._values.keep_sent()
        began = _now()
        result = run()
        seconds = _now() - began
        for direction, tensor in self._values.kept().items():
            torch.save(tensor, sent_file(self._request.folder, direction))
        if self._begun == 1:
            self._values.end_first_step()
        if self._timed is not None:
            self._end_counting()
            self._steps.append(_step_of(self._timed, began, seconds))
            self._timed = None
            _check_finite(result, model)
        self._trained += 1
        if len(self._steps) == self._request.steps:
            raise _Ended
        return result

    def _begin_counting(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self._lasting = max(self._lasting, torch.cuda.memory_allocated())

    def _end_counting(self) -> None:
        if torch.cuda.is_available():
            self._allocated = max(self._allocated, torch.cuda.max_memory_allocated())
            self._reserved = max(self._reserved, torch.cuda.max_memory_reserved())

    # ---- Passes of the rehearsed rank

    def begin(self, step: ObservedStep) -> None:
        self._pipeline_rank, self._pipeline_ranks = step.pipeline.rank(), step.pipeline.size()
        self._schedule = step.program.schedule.name
        self._digest = "" if isinstance(step, StocksStep) else step.program.digest
        if self._timed is None:
            return
        make = _TimedDeviceClock if torch.cuda.is_available() else _TimedHostClock
        clock = make(self._timed.host_times, self._times)
        self._timed.recording = step.recorder.record(clock)
        if self._recorder is not step.recorder:
            self._recorder = step.recorder
            self._time_waits(step.recorder.device)

    def _time_waits(self, device: DeviceProgress) -> None:
        """Make ``device`` count the seconds for which the host waits for it between passes."""
        hold_back = device.hold_back

        def timed() -> None:
            began = time.perf_counter()
            hold_back()
            if self._timed is not None and self._timed.host_times:
                self._timed.waited += time.perf_counter() - began

        device.hold_back = timed  # type: ignore[method-assign]

    # ---- Messages of Megatron's own schedules

    def _send(self, is_forward: bool, tensor: Tensor) -> dist.Work:
        self._values.note(FORWARD if is_forward else BACKWARD, tensor)
        other = self._neighbour(1 if is_forward else -1)
        return self._post(self._pipeline_rank, other, is_forward)

    def _receive(self, is_forward: bool, tensor: Tensor) -> dist.Work:
        self._values.fill(FORWARD if is_forward else BACKWARD, tensor)
        other = self._neighbour(-1 if is_forward else 1)
        return self._post(other, self._pipeline_rank, is_forward)

    def _neighbour(self, distance: int) -> int:
        """Return the pipeline rank at ``distance`` from this one; rank 0 follows the last rank."""
        return (self._pipeline_rank + distance) % self._pipeline_ranks

    def _post(self, sender: int, receiver: int, is_forward: bool) -> dist.Work:
        kind = Kind.SEND_F if is_forward else Kind.SEND_B
        return self._times.post([str(Channel(sender, receiver, kind))])


def _refuse(config: PipelineConfig) -> None:
    """Raise ValueError if ``config`` has a setting in which ranks that are not here take part."""
    refuse_untried_settings(config)
    for name in WATCHING:
        if getattr(config, name):
            raise ValueError(f"{flag(name)} cannot be rehearsed: drop {flag(name)}")
    if config.costs.profile is not None:
        raise ValueError(
            f"{flag('costs')} {config.costs} cannot be rehearsed, since it measures all ranks: "
            "name a costs file, or write estimate"
        )


def _refuse_uninitialised() -> None:
    """Raise ValueError if torch's fake process group does not write the results of collectives.

    Older versions of torch leave them uninitialised.
    """
    size = dist.get_world_size()
    ones = torch.ones(size, device=torch.cuda.current_device())
    gathered, exchanged, part = (torch.full_like(ones, math.nan) for _ in range(3))
    dist.all_gather_into_tensor(gathered, ones[:1])
    dist.all_to_all_single(exchanged, ones, [1] * size, [1] * size)
    dist.reduce_scatter_tensor(part[:1], ones)
    results = {"gather": gathered, "all-to-all": exchanged, "reduce-scatter": part[:1]}
    left = [name for name, result in results.items() if not bool(result.isfinite().all())]
    if left:
        raise ValueError(
            f"torch {torch.__version__}: its fake process group leaves the results of "
            f"{' and '.join(left)} uninitialised; install a later torch"
        )


def _vocabulary() -> int:
    return int(training_global("_GLOBAL_ARGS").padded_vocab_size)


def _now() -> float:
    """Return the host's time at which the device has finished all work launched so far."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _step_of(timed: _TimedStep, began: float, seconds: float) -> RehearsedStep:
    """Return the record of a timed step that has ended.

    Args:
        began: host's time at which the step began.
        seconds: seconds that the whole step took.
    """
    if timed.recording is None:
        raise ValueError("the passes of the rehearsed step were not recorded")
    between = sum(timed.host_times[2::2]) - sum(timed.host_times[1:-1:2])
    events, _ = timed.recording.read()  # reading records one more event on a GPU
    passes = [RehearsedPass(one.action, one.start - began, one.end - began) for one in events]
    return RehearsedStep(tuple(passes), seconds, between - timed.waited)


def _check_finite(result: Sequence[Any], model: Any) -> None:
    """Raise ValueError unless the losses of a step and all gradients of ``model`` are finite.

    Megatron's own check does nothing under torch's fake process group.

    Args:
        result: result of Megatron's train_step: losses by name, and whether the step was skipped.
    """
    losses, skipped = result[0], result[1]
    for name, loss in losses.items():
        if not math.isfinite(float(loss)):
            raise ValueError(f"the step's {name} is {float(loss)}")
    if skipped:
        raise ValueError("Megatron has skipped the step, since gradients overflow in fp16")
    norms = [torch.linalg.vector_norm(one, dtype=torch.float32) for one in _gradients(model)]
    if not norms:
        raise ValueError("the step has no gradients")
    if not bool(torch.stack(norms).isfinite().all()):
        raise ValueError("the step's gradients are not finite")


def _gradients(model: Any) -> Iterator[Tensor]:
    for chunk in model:
        for parameter in chunk.parameters():
            gradient = getattr(parameter, "main_grad", None)
            gradient = parameter.grad if gradient is None else gradient
            if gradient is not None:
                yield gradient
