"""A step composed of ranks that ran alone, compared with the step of all ranks together.

    python -m scripts.benchmarks.rehearsed [--slower-after-wait 4] [--schedules "1f1b zb-v"]

On emulated clocks: passes sleep as long as they cost, on unequal stages, and differ by up to 10 %
between microbatches. Together, four ranks exchange messages over gloo. Alone, each rank runs as
`megatron-ext rehearse` runs it, with made-up peers under torch's fake process group; then once more
with its messages at the times of the composed step (`--replay`), and a third time at those of the
replayed one. A step that is composed of the passes that the ranks ran together shows the error of
the composition alone.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.registry import choose
from megatron_ext.rehearsal.classes import RankClass
from megatron_ext.rehearsal.compose import compose
from megatron_ext.rehearsal.message_times import MessageTimes
from megatron_ext.rehearsal.record import (
    RankRecord,
    RehearsedPass,
    RehearsedStep,
    load_rank_record,
    save_rank_record,
)
from megatron_ext.rehearsal.rehearsed_peers import rehearsed_peers
from megatron_ext.rehearsal.request import ReplayRequest
from megatron_ext.rehearsal.values import Values
from megatron_ext.runtime.messages.peers import rehearse_with
from megatron_ext.runtime.recording import clock_of
from megatron_ext.runtime.world import gather_from_all
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs import Costs, PassCosts
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.timeline import Event
from scripts.benchmarks.contestants import CPU, EmulatedRank
from scripts.benchmarks.emulated import WAIT, slow_after_waits
from scripts.benchmarks.harness import arguments, print_table
from scripts.benchmarks.runs import before_everything_else, on_forked_ranks
from scripts.benchmarks.unequal_clocks import UnequalStage

SCHEDULES = "1f1b zb-h1 zb-v v-half interleaved-zb gis"
RANKS, MICROBATCHES, STEPS = 4, 8, 3
SECONDS = {  # seconds of each kind of pass for a mean microbatch
    Kind.FORWARD: 0.040,
    Kind.BACKWARD_INPUT: 0.050,
    Kind.BACKWARD_WEIGHT: 0.030,
}
ENDS = 0.9, 1.25  # seconds of the first and of the last stage, relative to other stages
UNEQUAL = 0.1  # largest relative difference of a microbatch's seconds from the mean
VOCABULARY = 8  # number of tokens of a vocabulary; no stage here computes with it

Moved = Mapping[str, tuple[float, ...]]  # `ComposedStep.moved` of a rank


@dataclass(frozen=True)
class Composed:
    """Seconds of a step of the schedule ``spec``: composed in several ways, and measured.

    Attributes:
        composed: composed of ranks that ran alone.
        replayed: composed of ranks that ran alone, with messages at the times of the step
            ``composed``.
        repeated: the same, with messages at the times of the step ``replayed``.
        of_real_passes: composed of the passes of ranks that ran together.
        real: the median of the measured steps.
    """

    spec: str
    composed: float
    replayed: float
    repeated: float
    of_real_passes: float
    real: float

    @property
    def error(self) -> float:
        return self.composed / self.real - 1

    @property
    def error_of_replay(self) -> float:
        return self.replayed / self.real - 1

    @property
    def change_of_another_replay(self) -> float:
        return self.repeated / self.replayed - 1

    @property
    def error_of_real_passes(self) -> float:
        return self.of_real_passes / self.real - 1


def costs_of(placement: Placement) -> Costs:
    """Return the costs of stages of which the first and the last differ from the others."""
    factors = [1.0] * placement.stages
    factors[0], factors[-1] = ENDS
    return Costs(
        PassCosts(
            {
                kind: tuple(seconds * factor for factor in factors)
                for kind, seconds in SECONDS.items()
            }
        )
    )


def measure(spec: str, slower_after_wait: float = 0.0) -> Composed:
    """Run the schedule ``spec`` on all ranks together, and on each rank alone.

    Args:
        slower_after_wait: seconds by which a pass is longer after its rank has waited.
    """
    placement = choose(spec).place(RANKS)
    problem = Problem(placement, MICROBATCHES, costs_of(placement))
    program = build_program(choose(spec), problem)
    together = on_forked_ranks(
        RANKS, lambda: gather_from_all(_steps(program, spec, slower_after_wait))
    )
    classes = [RankClass(rank, (rank,), True) for rank in range(RANKS)]

    def rehearsed(moved: Sequence[Moved | None]) -> dict[int, RankRecord]:
        with tempfile.TemporaryDirectory() as folder:
            given = program, spec, slower_after_wait, folder, moved
            # The ranks run at the same time: they sleep, so they do not slow one another.
            torch.multiprocessing.start_processes(_alone, given, nprocs=RANKS, start_method="fork")
            return {rank: load_rank_record(Path(folder, f"{rank}.json")) for rank in range(RANKS)}

    records = rehearsed([None] * RANKS)
    real = {rank: _record(rank, program, map(_without_waits, together[rank])) for rank in records}
    alone, of_real = (compose(program, classes, of_ranks) for of_ranks in (records, real))
    replayed = compose(program, classes, records, rehearsed(alone.moved))
    repeated = compose(program, classes, records, rehearsed(replayed.moved))
    return Composed(
        spec,
        composed=alone.timeline.makespan,
        replayed=replayed.timeline.makespan,
        repeated=repeated.timeline.makespan,
        of_real_passes=of_real.timeline.makespan,
        real=statistics.median(map(_makespan, *together)),
    )


def _makespan(*ranks: Sequence[Event]) -> float:
    """Return the seconds from the first start to the last end of the passes of all ``ranks``."""
    return max(passes[-1].end for passes in ranks) - min(passes[0].start for passes in ranks)


def _without_waits(step: Sequence[Event]) -> Iterator[Event]:
    now = 0.0
    for event in step:
        yield event._replace(start=now, end=now + event.end - event.start)
        now += event.end - event.start


def _record(rank: int, program: Program, steps: Iterable[Iterable[Event]]) -> RankRecord:
    made = []
    for step in steps:
        passes = tuple(RehearsedPass(one.action, one.start, one.end) for one in step)
        made.append(RehearsedStep(passes, passes[-1].end - passes[0].start))
    name = program.schedule.name
    return RankRecord(rank, RANKS, rank, name, program.digest, STEPS + 1, tuple(made))


def _steps(
    program: Program, spec: str, slower_after_wait: float, times: MessageTimes | None = None
) -> list[list[Event]]:
    """Run some steps of this rank, and return the passes of each step but the first.

    Args:
        times: when the messages of absent peers arrive; None if the peers run too.
    """
    slow_after_waits(slower_after_wait)
    emulated = EmulatedRank(program.schedule, program.problem.costs, UnequalStage)
    draws = random.Random(0)
    factors = torch.tensor([1 + draws.uniform(-UNEQUAL, UNEQUAL) for _ in range(MICROBATCHES)])
    for stage in emulated.stages.values():
        assert isinstance(stage, UnequalStage)
        stage.factors = {kind: factors.numpy() for kind in SECONDS}
    made = []
    for _ in range(STEPS + 1):
        dist.barrier()
        # A rank that runs alone also has the optimizer's step between two steps.
        time.sleep(2 * WAIT)
        if times is not None:
            times.begin_step(is_timed=True)
            times.begin_time()
        recording = emulated.recorder.record(clock_of(CPU))
        emulated.step(program, choose(spec).traits.splits_backward)
        made.append(recording.read()[0])
        emulated.recorder.end()
    return made[1:]


def _alone(
    rank: int,
    program: Program,
    spec: str,
    slower_after_wait: float,
    folder: str,
    moved: Sequence[Moved | None],
) -> None:
    torch.set_num_threads(1)
    before_everything_else()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
    given = moved[rank]
    times = MessageTimes(None if given is None else ReplayRequest(given))
    rehearse_with(rehearsed_peers(Values({}), times, lambda: VOCABULARY))
    gc.collect()
    gc.disable()
    record = _record(rank, program, _steps(program, spec, slower_after_wait, times))
    save_rank_record(record, Path(folder, f"{rank}.json"))


def main(words: Sequence[str] | None = None) -> int:
    given = arguments(
        __doc__,
        words,
        schedules=(SCHEDULES, "to compare"),
        slower_after_wait=(0.0, "milliseconds that a pass takes longer after a wait"),
    )
    found = (measure(spec, given.slower_after_wait / 1000) for spec in given.schedules.split())
    rows = (
        (
            *(one.spec, f"{one.composed:.3f}", f"{one.replayed:.3f}", f"{one.real:.3f}"),
            *(f"{error:+.1%}" for error in (one.error, one.error_of_replay)),
            *(f"{one.change_of_another_replay:+.2%}", f"{one.error_of_real_passes:+.1%}"),
        )
        for one in found
    )
    heads = (
        *("schedule", "composed, s", "replayed, s", "real, s", "error", "error, replayed"),
        *("another replay changes", "error, with the passes of real ranks"),
    )
    print_table(heads, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
