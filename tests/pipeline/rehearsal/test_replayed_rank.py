"""Tests of the replay of one rank alone, in which its messages arrive as in the composed step of
all ranks.

Passes of the composed step take far longer than those of this model, so each pass of the rank waits
for its messages and begins no earlier than in the composed step.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ext.compile.program.graph import channel_of
from megatron_ext.launch.command.launch_words import read_launch
from megatron_ext.launch.planner.parsed_launch import LaunchRequest
from megatron_ext.rehearsal.classes import RankClass
from megatron_ext.rehearsal.compose import ComposedStep, compose
from megatron_ext.rehearsal.prepare import ESTIMATE, PreparedSchedule, prepare
from megatron_ext.rehearsal.rank_command import words_alone
from megatron_ext.rehearsal.record import RankRecord, RehearsedPass, RehearsedStep
from megatron_ext.rehearsal.request import ReplayRequest
from megatron_ext.schedule.action import Kind
from tests.helpers.combinations import at_night, nightly
from tests.helpers.live_bytes import count_bytes, counted
from tests.helpers.megatron_runs import SCRIPT, model_flags
from tests.helpers.rehearsals import rehearsed

RANKS, MICROBATCHES = 4, 8
RECEIVED = {
    Kind.FORWARD: Kind.RECV_F,
    Kind.BACKWARD_INPUT: Kind.RECV_B,
    Kind.FULL_BACKWARD: Kind.RECV_B,
}
SECONDS = 0.05  # seconds of a composed pass; the model's own passes take a few milliseconds


def composed(schedule: PreparedSchedule) -> ComposedStep:
    """Return a composed step in which every pass takes `SECONDS`."""
    program = schedule.program

    def passes(rank: int) -> Iterator[RehearsedPass]:
        for number, action in enumerate(program.schedule.compute_rows[rank]):
            yield RehearsedPass(action, number * SECONDS, (number + 1) * SECONDS)

    records = {
        rank: RankRecord(
            *(rank, RANKS, rank, schedule.spec, "", 1),
            (RehearsedStep(tuple(passes(rank)), 1e3),),
        )
        for rank in range(RANKS)
    }
    classes = [RankClass(rank, (rank,), True) for rank in range(RANKS)]
    return compose(program, classes, records)


def arrivals(
    schedule: PreparedSchedule, step: ComposedStep, rank: int
) -> dict[tuple[int, Kind | None, int], float]:
    """Return the time at which each message that ``rank`` receives has arrived, by stage, kind and
    microbatch."""
    as_run, _ = schedule.program.as_run
    left = {name: iter(times) for name, times in step.moved[rank].items()}
    return {
        (action.stage, action.kind, action.microbatch): next(left[str(channel)])
        for action in as_run.rows[rank]
        if action.kind in RECEIVED.values()
        for channel in [channel_of(action, as_run.placement)]
    }


def prepared(
    name: str, folder: Path, **overrides: object
) -> tuple[PreparedSchedule, tuple[str, ...]]:
    """Return the schedule ``name`` as `prepare` returns it for a rehearsal, and the flags of a rank
    that runs alone."""
    words = model_flags(
        pipeline_model_parallel_size=RANKS,
        num_layers=8,
        global_batch_size=MICROBATCHES,
        pipeline_schedule="zb-v" if name == "stock" else name,
        **overrides,
    )
    launch = read_launch(["torchrun", "--nproc-per-node", str(RANKS), str(SCRIPT), *words])
    (schedule,) = prepare(LaunchRequest(launch), (name,), folder).schedules
    costs = None if name == "stock" else folder / name / ESTIMATE
    own = words_alone(schedule.arguments, costs, balances_experts=False, is_cpu=True)
    return schedule, tuple(own)


@pytest.mark.parametrize(
    ("name", "rank", "overrides"),
    [
        ("stock", 1, {}),
        ("zb-v", 1, {"pipeline_vocab_parallel": 1}),
        *at_night(
            ("stock", 3, {}),
            ("stock", 0, {"num_virtual_stages_per_pipeline_rank": 2}),
            ("stock", 2, {"num_virtual_stages_per_pipeline_rank": 2}),
            (
                "stock",
                2,
                {"num_virtual_stages_per_pipeline_rank": 2, "overlap_p2p_communication": False},
            ),
            ("zb-h1", 0, {}),
            ("zb-v", 3, {}),
            ("interleaved-zb", 2, {"pipeline_p2p": "batched"}),
            ("v-half", 2, {}),
        ),
    ],
)
def test_a_pass_begins_when_its_messages_are_there(
    name: str, rank: int, overrides: dict[str, object], tmp_path: Path
) -> None:
    schedule, own = prepared(name, tmp_path, **overrides)
    step = composed(schedule)
    record = rehearsed(rank, RANKS, own, replay=ReplayRequest(step.moved[rank]))
    (ran,) = record.steps
    row = step.timeline.compute[rank]
    assert [str(one.action) for one in ran.passes] == [str(one.action) for one in row]
    arrived = arrivals(schedule, step, rank)
    begins = [
        (one.start, arrived[key])
        for one in ran.passes
        if (key := (one.action.stage, RECEIVED.get(one.action.kind), one.action.microbatch))
        in arrived
    ]
    assert len(begins) == len(arrived) >= MICROBATCHES
    assert all(began >= at for began, at in begins)


@nightly("by day the bytes of a rank alone are those among the others")
@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
def test_replayed_messages_change_no_bytes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every action a rank whose messages are replayed stores what it stores alone. So the
    memory that a rehearsal with ``--replay`` shows is the memory of the launch."""
    schedule, own = prepared(name, tmp_path)
    count_bytes(monkeypatch, tmp_path)
    moved = composed(schedule).moved
    for rank in (1, 3):
        rehearsed(rank, RANKS, own)
        (at_once,) = counted(tmp_path, range(rank, rank + 1))
        (tmp_path / str(rank)).unlink()
        rehearsed(rank, RANKS, own, replay=ReplayRequest(moved[rank]))
        (replayed,) = counted(tmp_path, range(rank, rank + 1))
        assert replayed == at_once
