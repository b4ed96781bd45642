"""Tests of a rank that fails between its optimizer step and the verdict on it (post-validation).

Every rank ends soon and says what it waited for.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

pytest.importorskip("torch")

from megatron_ext.compile.registry import choose
from megatron_ext.features.post_validation.runtime import messages as validation
from megatron_ext.features.post_validation.runtime.messages import ValidationMessages
from megatron_ext.features.post_validation.runtime.partial_state import PartialState
from megatron_ext.runtime import watchdog
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.placement import line
from tests.helpers.combinations import each_once
from tests.helpers.ranks import RankResult, Script, running_ranks, values
from tests.helpers.stages import Pipeline, program_for, world
from tests.helpers.validation import Course, StepAtOnce
from tests.pipeline.failures.test_faults import (
    HERE,
    be_soon_stuck,
    kill,
    say,
    stop,
    throw,
    wait_until_told,
)

pytestmark = pytest.mark.real_time

RANKS = 3

BEFORE_STATE = "before its state is passed on"
AFTER_STATE = "after its state was passed on"
SPECULATION = "in the first pass of the next step"
SETTLE = "when it asks for the verdict"
REDO = "when it does the step again"


class Faulty(StepAtOnce):
    """Validation of two steps in which this rank runs ``fault`` at ``where`` in the first step or
    in its verdict."""

    def __init__(self, pipeline: Pipeline, where: str, fault: Callable[[], None]) -> None:
        # norms exceed this limit, so every verdict is bad
        super().__init__(pipeline, Course(2), limits=[1e-9] * 2)
        self.where = where
        self.fault = fault

    def get_to(self, where: str) -> None:
        if where == self.where:
            self.fault()

    def optimizer_step(self) -> None:
        self.get_to(BEFORE_STATE)
        super().optimizer_step()
        self.get_to(AFTER_STATE)

    def commit_or_rollback(self) -> bool:
        if self.messages.is_pending:
            self.get_to(SETTLE)
        return super().commit_or_rollback()

    def redo(self, state: PartialState) -> None:
        self.get_to(REDO)
        super().redo(state)


@dataclass(frozen=True)
class Steps:
    """Two steps of zb-2p with a watchdog, in which rank ``failing`` fails."""

    failing: int
    where: str
    fault: Callable[[], None]
    swallows: bool = False

    def __call__(self, rank: int) -> None:
        watchdog.GRACE_SECONDS = 0.5
        be_soon_stuck()
        pipeline = Pipeline(program_for(choose("zb-2p"), RANKS, 5, steps_overlap=True), world())
        watchdog.Watchdog(pipeline.recorder).start()
        fails = rank == self.failing
        validation = Faulty(pipeline, self.where if fails else "", self.fault)
        try:
            for _ in range(2):
                pipeline.step(validation=validation)
                validation.optimizer_step()
                if fails and self.where == SPECULATION:
                    pipeline.stages[rank].faults = {Action(rank, Kind.FORWARD, 0): self.fault}
        except ValueError:
            if not self.swallows:
                raise
            for go_on in (pipeline.step, validation.optimizer_step):
                with pytest.raises(RuntimeError, match=f"rank {rank} has failed in an earlier"):
                    go_on()
            wait_until_told()


def check_cut_off(rank: int, result: RankResult) -> None:
    """Assert that ``rank`` has ended by an error that names the message and the rank it waited
    for."""
    assert result.exit_code == 1, (rank, result.exit_code, result.stderr)
    match = re.search(
        rf"PeerFailure: pipeline rank {rank} was waiting for {rank}(SEND_|RECV_|)([FBPV]|SETTLE)\d "
        r"\((to|from) pipeline rank (\d)\)",
        result.stderr,
    )
    assert match, result.stderr
    lane, what, direction, peer = match.groups()
    sends = lane == "SEND_"
    assert direction == ("to" if sends else "from")
    onwards = sends == (what in "FP")
    assert int(peer) == rank + (1 if onwards else -1)
    assert "Fatal" not in result.stderr


FAILING = [
    *((0, BEFORE_STATE), (1, BEFORE_STATE), (1, AFTER_STATE), (2, AFTER_STATE)),
    *((1, SPECULATION), (0, SPECULATION), (0, SETTLE), (1, SETTLE), (2, SETTLE), (1, REDO)),
]


@pytest.mark.parametrize(("at", "fault"), each_once(FAILING, [kill, throw]))
def test_every_rank_ends_when_one_fails(
    script: Script, at: tuple[int, str], fault: Callable[[], None]
) -> None:
    """If one rank fails, every other rank ends too. The thread that waits for the verdict does not
    keep a process from ending."""
    failing, where = at
    with running_ranks(RANKS, Steps(failing, where, fault), script) as running:
        results = running.wait()
    for rank, result in enumerate(results):
        if rank != failing:
            check_cut_off(rank, result)
    assert results[failing].exit_code == (-signal.SIGKILL if fault is kill else 1)
    if fault is throw:
        assert "ValueError: the model is broken" in results[failing].stderr
        assert "PeerFailure" not in results[failing].stderr
        assert "Fatal" not in results[failing].stderr


@pytest.mark.parametrize(
    ("failing", "where"),
    [(0, SPECULATION), (1, SPECULATION), (1, SETTLE), (2, SETTLE), (1, REDO)],
)
def test_a_rank_whose_caller_goes_on_after_its_error(
    script: Script, failing: int, where: str
) -> None:
    """A rank whose caller survives an error may have a thread that still waits for the verdict. The
    tensors of that thread stay alive, and the process ends without an abort."""
    with running_ranks(RANKS, Steps(failing, where, throw, swallows=True), script) as running:
        running.wait_until_it_says(failing, HERE)
        others = [rank for rank in range(RANKS) if rank != failing]
        running.wait_until_ended(*others)
        running.send_signal(failing, signal.SIGUSR1)
        results = running.wait()
    assert results[failing].exit_code == 0, results[failing].stderr
    for rank in others:
        check_cut_off(rank, results[rank])


@pytest.mark.parametrize(
    ("where", "waits"),
    [
        (BEFORE_STATE, {0: "SETTLE", 2: "RECV_P"}),
        (AFTER_STATE, {0: "SETTLE", 2: "SEND_V"}),
    ],
)
def test_what_ranks_wait_for_is_named(script: Script, where: str, waits: dict[int, str]) -> None:
    """Ranks name the message they wait for: in the watchdog's line while rank 1 hangs, and in their
    error when rank 1 is killed."""
    with running_ranks(RANKS, Steps(1, where, stop), script) as running:
        for rank, kind in waits.items():
            way = "to" if kind == "SEND_V" else "from"
            running.wait_until_it_says(
                rank, f"pipeline rank {rank} waiting for {rank}{kind}0 {way} pipeline rank 1"
            )
        running.send_signal(1, signal.SIGKILL)
        results = running.wait()
    for rank, kind in waits.items():
        check_cut_off(rank, results[rank])
        assert f"was waiting for {rank}{kind}0 (" in results[rank].stderr
    assert "megatron_ext: pipeline rank 0, in 0SETTLE0" in results[0].stderr


def leave_without_the_verdict(rank: int) -> None:
    validation.LOOK_SECONDS = 0.0  # with this interval the thread is nearly always inside torch
    messages = ValidationMessages(world(), line(2), Recorder(rank))
    messages.pass_on(PartialState())
    if rank == 0:
        messages.expect()
        assert "megatron_ext verdict" in [thread.name for thread in threading.enumerate()]
        say("leaves")
    else:
        time.sleep(3)


def test_a_process_may_end_before_its_verdict(script: Script) -> None:
    """A process may end before the verdict on its last step has come. The interpreter used to abort
    at its exit, because the thread that waits for the verdict was inside torch."""
    with running_ranks(2, leave_without_the_verdict, script) as running:
        running.wait_until_it_says(0, "leaves")
        running.wait_until_ended(0)
        values(running.wait())
