"""Real executors on ranks whose passes sleep as long as they cost.

One launch forks the ranks and times every contender in turn, so that what disturbs one disturbs
all; the median over launches is reported. Ranks run before everything else (SCHED_RR) where the
system lets them, without the garbage collector.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

from megatron_ext.compile.registry import choose
from megatron_ext.launch.script import CPU_PLATFORM
from megatron_ext.patches.engine import apply
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.placement import line
from megatron_ext.schedule.problem import ScheduleOptions, VocabularyParallel
from scripts.benchmarks.contestants import ours, program_of, torchs
from scripts.benchmarks.emulated import (
    Contender,
    EmulatedChunk,
    data,
    synchronise,
    take,
)

STEPS = 3  # number of timed steps, after one that is not timed
STEPS_IN_A_ROW = 10  # number of timed consecutive steps, if steps may overlap
# Number of sleeps of 20 ms, which measure how late a rank wakes up and how slow it is then.
SLEEPS = 25
NOISY = 0.03  # share of spread, or of late passes, from which times count as too noisy

# Costs in milliseconds of passes that take almost no time, to measure the executor's own time.
_FREE = "f=1e-6,i=1e-6,w=1e-6"

DEFAULT_SCHEDULES = "1f1b zb-h1 zb-auto interleaved gis zb-v v-half v-min v-auto dualpipe-v"


@dataclass(frozen=True)
class Setting:
    """Settings of a benchmark of executors.

    Attributes:
        costs: milliseconds that a rank takes for a microbatch, as text (`parse_costs`).
        specs: our schedules.
        launches: how often the ranks are started afresh.
        vocabulary: a method of vocabulary parallelism; our schedules are measured without it and
            with it.
        steps: number of timed steps of a launch, after one that is not timed.
        post_validation: whether steps run one after the other, each with an all-reduce at its end
            as an optimizer has one. Our schedules are measured without post-validation and with it,
            torch's not at all.
        pairs: whether our schedules with several stages on a rank are also measured with forward
            and backward passes that overlap in pairs.
    """

    ranks: int
    microbatches: int
    costs: str
    specs: tuple[str, ...]
    launches: int
    vocabulary: VocabularyParallel = VocabularyParallel.NONE
    steps: int = STEPS
    post_validation: bool = False
    pairs: bool = False

    @property
    def ours(self) -> list[tuple[str, ScheduleOptions]]:
        """Return the spec and the options of each of our own contenders."""
        vocabularies = dict.fromkeys([VocabularyParallel.NONE, self.vocabulary])
        combined = [ScheduleOptions(vocab_parallel=vocabulary) for vocabulary in vocabularies]
        if self.post_validation:
            combined.append(ScheduleOptions(steps_overlap=True))
        made = []
        for spec in self.specs:
            in_pairs = [ScheduleOptions(pairs=True)] * (
                self.pairs and choose(spec).example.chunks > 1
            )
            made += [(spec, options) for options in (*combined, *in_pairs)]
        return made


@dataclass(frozen=True)
class BenchResult:
    """Measured times of one contender over all launches of a benchmark.

    Attributes:
        ideal: seconds that the schedule takes with free messages and no overhead: its makespan;
            with post-validation about its span.
        measured: median seconds of a step, from the first start to the last end over all ranks.
            Where steps run in a row, the mean seconds from the last end of one to that of the next.
        efficiency: ideal / measured.
        speedup: the seconds of Megatron's 1F1B in the same launches, as a multiple of ``measured``.
        spread: (slowest - fastest launch) / median.
        host_microseconds: overhead of a pass: microseconds of a step whose passes take no time,
            divided by the number of its passes.
    """

    name: str
    ideal: float
    measured: float
    efficiency: float
    speedup: float
    spread: float
    host_microseconds: float


@dataclass(frozen=True)
class BenchReport:
    """Measured times of all contenders, and numbers that show how reliable these times are.

    Attributes:
        real_time: whether the ranks ran before all other processes of the machine.
        late: the largest share by which a pass lasted longer than its cost.
        autograd_microseconds: microseconds of autograd alone for a pass: after a sleep of 20 ms,
            and without a sleep. Every executor adds them to its passes, and a rank that has slept
            finds its caches cold.
    """

    rows: list[BenchResult]
    real_time: bool
    late: float
    autograd_microseconds: tuple[float, float]

    @property
    def doubts(self) -> list[str]:
        """Reasons not to trust the benchmark's times; empty if there are none."""
        spread = max((row.spread for row in self.rows), default=0.0)
        doubts = []
        if not self.real_time:
            doubts.append("ranks may not run before everything else here (SCHED_RR needs root)")
        if self.late > NOISY:
            doubts.append(f"passes lasted up to {self.late:.1%} longer than requested")
        if spread > NOISY:
            doubts.append(f"launches differ by up to {spread:.1%}")
        return doubts


@dataclass(frozen=True)
class _Steps:
    """Measured steps of one contender in one launch.

    Attributes:
        seconds: seconds of a step.
        host_seconds: seconds of a step whose passes take no time.
    """

    name: str
    ideal: float
    passes: int
    seconds: float
    # seconds that the host needs if passes take no time; they are measured last
    host_seconds: float = 0.0


@dataclass(frozen=True)
class _Launch:
    """Results of one launch: for each field, as in `BenchReport`, the largest of all ranks."""

    steps: dict[str, _Steps]
    real_time: bool
    late: float
    autograd: tuple[float, float]


def measure(setting: Setting, progress: Callable[[str], None]) -> BenchReport:
    """Measure all contenders of a benchmark; ``progress`` is called with what runs now.

    Raises:
        ValueError: a schedule does not allow these sizes.
    """
    sizes = setting.ranks, setting.microbatches, setting.costs
    # Builds all schedules, so that mistakes are reported here and not by a rank.
    for spec, options in setting.ours:
        program_of(choose(spec), *sizes, options)
    importlib.import_module("scripts.benchmarks.stock")  # imported once, before ranks are forked
    launches = []
    for number in range(setting.launches):
        progress(f"launch {number + 1} of {setting.launches}")
        launches.append(_launch(setting))
    stock = statistics.median(launch.steps["megatron 1f1b"].seconds for launch in launches)
    return BenchReport(
        [
            _measured([launch.steps[name] for launch in launches], stock)
            for name in launches[0].steps
        ],
        all(launch.real_time for launch in launches),
        max(launch.late for launch in launches),
        (
            1e6 * statistics.median(launch.autograd[0] for launch in launches),
            1e6 * statistics.median(launch.autograd[1] for launch in launches),
        ),
    )


def _measured(steps: Sequence[_Steps], stock: float) -> BenchResult:
    """Return the result of one contender from its steps in all launches.

    Args:
        stock: seconds of Megatron's 1F1B.
    """
    seconds = [launch.seconds for launch in steps]
    measured = statistics.median(seconds)
    first = steps[0]
    return BenchResult(
        first.name,
        first.ideal,
        measured,
        first.ideal / measured,
        stock / measured,
        (max(seconds) - min(seconds)) / measured,
        1e6 * statistics.median(launch.host_seconds for launch in steps) / first.passes,
    )


def _launch(setting: Setting) -> _Launch:
    """Fork the ranks, let them run every contender, and return the results from rank 0."""
    return on_forked_ranks(setting.ranks, partial(_contend, setting), _without_gpu)


def _without_gpu() -> None:
    cpu = importlib.import_module(CPU_PLATFORM)
    os.environ |= cpu.environment({})
    apply(cpu.patches())


def _contend(setting: Setting) -> _Launch:
    dist.barrier()
    late = _largest(_lateness())
    autograd = _largest(_autograd(0.02)), _largest(_autograd(0.0))
    steps = {}
    seconds_of = _in_a_row if setting.post_validation else _median_of
    for contender in _contenders(setting, setting.costs):
        seconds = seconds_of(contender, setting.steps)
        steps[contender.name] = _Steps(contender.name, contender.ideal, contender.passes, seconds)
    for free in _contenders(setting, _FREE):
        host_seconds = _median_of(free, setting.steps)
        steps[free.name] = replace(steps[free.name], host_seconds=host_seconds)
    return _Launch(steps, before_everything_else(), late, autograd)


def _median_of(contender: Contender, steps: int) -> float:
    """Return the median seconds of some steps, each of which is timed separately."""
    contender.step()
    seconds = [_timed(contender.step) for _ in range(steps)]
    if contender.commit_or_rollback is not None:
        contender.commit_or_rollback()
    return statistics.median(seconds)


def _contenders(setting: Setting, costs: str) -> Iterator[Contender]:
    from scripts.benchmarks import stock  # this module imports Megatron

    yield from stock.contenders(setting.ranks, setting.microbatches, costs)
    if not setting.post_validation:
        yield from torchs(setting.ranks, setting.microbatches, costs)
    for spec, options in setting.ours:
        yield ours(spec, setting.ranks, setting.microbatches, costs, options)


def _timed(step: Callable[[], None]) -> float:
    """Return the seconds of ``step``, from the first rank's start to the last rank's end."""
    dist.barrier()
    start = time.monotonic()  # all processes of a machine share this clock
    step()
    end = time.monotonic()
    return _largest(end) + _largest(-start)


def _in_a_row(contender: Contender, steps: int) -> float:
    """Return the mean seconds of steps that run in a row.

    A step lasts from the end of the step before, on the last rank to end it, to its own end.
    """
    dist.barrier()
    ends = []
    for _ in range(1 + steps):
        contender.step()
        if contender.commit_or_rollback is None:
            synchronise()
        ends.append(time.monotonic())
    last_ends = torch.tensor(ends, dtype=torch.float64)
    dist.all_reduce(last_ends, dist.ReduceOp.MAX)
    if contender.commit_or_rollback is not None:
        contender.commit_or_rollback()
    return float(last_ends.diff().mean())  # mean over steps 1, 2, ...


def _lateness() -> float:
    """Return by which share of its seconds a sleep on this machine lasts too long: the
    second-largest share of several sleeps."""
    seconds = 0.02
    lasted = []
    for _ in range(SLEEPS):
        start = time.monotonic()
        take(seconds)
        lasted.append(time.monotonic() - start)
    return sorted(lasted)[-2] / seconds - 1


def _autograd(sleep: float) -> float:
    """Return the seconds of a pass that computes nothing, which begins after ``sleep`` seconds."""
    chunk = EmulatedChunk(0, uniform(line(1), 1e-9, 1e-9, 1e-9))
    lasted = []
    for _ in range(SLEEPS):
        time.sleep(sleep)
        start = time.monotonic()
        chunk(data()).sum().backward()
        lasted.append((time.monotonic() - start) / 2)
    return statistics.median(lasted)


def _largest(value: float) -> float:
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


def on_forked_ranks[T](
    ranks: int, run: Callable[[], T], prepare: Callable[[], object] = lambda: None
) -> T:
    """Return what ``run`` returns on rank 0 of as many forked ``ranks``, which communicate by gloo.

    Args:
        prepare: is called on each rank before the process group is made.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            _forked_rank, (ranks, run, prepare, folder), nprocs=ranks, start_method="fork"
        )
        return pickle.loads(Path(folder, "result").read_bytes())


def _forked_rank(
    rank: int, ranks: int, run: Callable[[], object], prepare: Callable[[], object], folder: str
) -> None:
    torch.set_num_threads(1)
    before_everything_else()
    prepare()
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    gc.collect()
    gc.disable()
    result = run()
    if rank == 0:
        Path(folder, "result").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def before_everything_else() -> bool:
    """Let this rank run before all other processes, and return whether the system allows it.

    Ranks take turns (SCHED_RR). Under SCHED_FIFO a thread runs until it waits, and four ranks on
    two cores have been seen to keep one another from going on.
    """
    with contextlib.suppress(PermissionError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(5))
        return True
    return False
