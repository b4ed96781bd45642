"""Tests of a rank that fails between two steps: the other ranks report which rank failed, where and
when.

The other ranks used to wait for the failed one in a collective of Megatron's, or for its next
message: until torch's timeout of ten minutes or more, or on gloo until an error that names no rank.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.training import training as megatron_training

from megatron_ext.runtime import watchdog
from megatron_ext.runtime.interruption import listen, stop_listening
from megatron_ext.runtime.messages.connecting import connecting
from megatron_ext.runtime.rank_identity import rank_identity
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.store import failure_report
from tests.helpers.combinations import at_night
from tests.helpers.ranks import RankResult, Script, agent_store, running_ranks, values
from tests.helpers.stages import world
from tests.pipeline.failures.test_bad_days import Training, pipeline_flags
from tests.pipeline.failures.test_faults import HERE, kill, say, throw, wait_until_told

pytestmark = pytest.mark.real_time

RANKS, FAILING = 3, 1
SOON = 60.0  # seconds on a busy machine; Megatron's own timeout is 10 minutes

BETWEEN = (
    r"between steps for \d+\.\d s \[pipeline rank {0} is global rank {0}, local rank {0} on .*; "
    r"iteration {1}; .*\]"
)


@dataclass(frozen=True)
class BetweenSteps:
    """Fault that rank `FAILING` runs in call number ``call`` of ``where``, counted from 1."""

    where: str
    fault: Callable[[], None]
    call: int = 2

    def install(self, rank: int) -> None:
        watchdog.GRACE_SECONDS = 1.0
        if rank != FAILING:
            return
        owner, name = {
            "optimizer": (torch.optim.Adam, "step"),
            "scheduler": (OptimizerParamScheduler, "step"),
            "save": (megatron_training, "save_checkpoint"),
            "evaluation": (megatron_training, "evaluate"),
        }[self.where]
        original, calls = getattr(owner, name), list[None]()

        def fail(*args: Any, **kwargs: Any) -> Any:
            calls.append(None)
            if len(calls) == self.call:
                self.fault()
            return original(*args, **kwargs)

        setattr(owner, name, fail)


def fill_the_disk() -> None:
    raise OSError(28, "No space left on device")


def flags_of(where: str, folder: Path) -> list[str]:
    flags: dict[str, object] = {"pipeline_schedule": "zb-h1", "clip_grad": 1}
    if where == "save":
        flags |= {"save": folder, "save_interval": 2}
    if where == "evaluation":
        flags |= {"eval_iters": 1, "eval_interval": 2}
    return pipeline_flags(RANKS, 6, **flags)


def end_of(script: Script, flags: list[str], fault: BetweenSteps) -> list[RankResult]:
    with agent_store() as port:
        run = Training(RANKS, port, flags, fault)
        with running_ranks(RANKS, run, script, connect=False) as running:
            return running.wait()


@pytest.mark.parametrize(
    ("where", "call"),
    [("optimizer", 2), ("save", 1), *at_night(("scheduler", 3), ("evaluation", 1))],
)
def test_every_rank_hears_of_one_that_fails_between_steps(
    script: Script, tmp_path: Path, where: str, call: int
) -> None:
    fault = BetweenSteps(where, fill_the_disk, call)
    results = end_of(script, flags_of(where, tmp_path), fault)
    words = f"pipeline rank {FAILING}, {BETWEEN.format(FAILING, 2)}"
    failed = results[FAILING]
    assert failed.exit_code == 1
    assert re.search(f"megatron_ext: {words}$", failed.stderr, re.MULTILINE), failed.stderr
    assert "OSError: [Errno 28] No space left on device" in failed.stderr
    for rank in {*range(RANKS)} - {FAILING}:
        result = results[rank]
        assert result.exit_code == 1, result.stderr
        assert result.seconds - failed.seconds < SOON
        heard = f"another rank ha[sd] failed: {words}: OSError: .Errno 28. No space left on device"
        assert re.search(heard, result.stderr), result.stderr
        assert "look for its first error" not in result.stderr


@pytest.mark.parametrize(
    ("where", "call"), [("optimizer", 2), *at_night(("save", 1), ("scheduler", 3))]
)
def test_every_rank_hears_of_one_that_is_killed_between_steps(
    script: Script, tmp_path: Path, where: str, call: int
) -> None:
    """If a rank is killed between two steps, every other rank ends and names its own action and
    time, or those of the first rank that lost a connection. A killed rank cannot report anything by
    itself."""
    results = end_of(script, flags_of(where, tmp_path), BetweenSteps(where, kill, call))
    assert results[FAILING].exit_code == -signal.SIGKILL
    others = [results[rank] for rank in range(RANKS) if rank != FAILING]
    for result in others:
        assert result.exit_code == 1, result.stderr
        assert result.seconds - results[FAILING].seconds < SOON
        # A report names the position of the reporting rank, or of the first rank that lost a
        # connection. A message after the optimizer belongs to the next step.
        assert re.search(
            r"pipeline rank \d, (between steps for \d+\.\d s|in \d\w+) \[.*; iteration [23]; ",
            result.stderr,
        ), result.stderr


def leave() -> None:
    sys.exit(0)


def test_a_rank_that_ends_an_evaluation_early_has_not_failed(
    script: Script, tmp_path: Path
) -> None:
    """A rank that leaves an evaluation early, without an error, is reported as ended and not as
    failed. Other ranks used to print that the first error of that rank is the cause, although it
    had none."""
    results = end_of(script, flags_of("evaluation", tmp_path), BetweenSteps("evaluation", leave, 1))
    assert results[FAILING].exit_code == 0, results[FAILING].stderr
    ended = f"pipeline rank {FAILING} {BETWEEN.format(FAILING, 2)}"
    said = [result.stderr for result in results if result.exit_code != 0]
    assert len(said) == RANKS - 1
    for stderr in said:
        assert "look for its first error" not in stderr, stderr
    assert any(
        re.search(f"a rank has ended without an error: {ended}", stderr) for stderr in said
    ), said


# --- ranks that listen for failures, without a training


def listening(rank: int) -> Recorder:
    failure_report.LOOK_SECONDS = 0.1
    watchdog.GRACE_SECONDS = 0.5
    recorder = Recorder(rank, rank_identity(world()))
    assert listen(recorder) is not None
    recorder.begin(7)
    recorder.leave()
    return recorder


def data() -> Iterator[int]:
    yield 1


def catch_and_go_on(rank: int) -> None:
    """Raise errors that the caller catches, as at the end of an epoch or in an attempt that is
    repeated afterwards. No process ends by them."""
    recorder = listening(rank)
    if rank == 0:
        items = data()
        next(items)
        for attempt in (lambda: next(items), throw, fill_the_disk):
            with pytest.raises((StopIteration, ValueError, OSError)):
                attempt()
        worker = os.fork()
        if worker == 0:  # a data-loader worker, which inherits the hook
            try:
                throw()
            except ValueError as error:
                sys.excepthook(type(error), error, error.__traceback__)
            stop_listening(recorder)  # as happens at the end of a process
            os._exit(0)
        os.waitpid(worker, 0)
    time.sleep(1.0)
    assert recorder.interruption is None
    assert recorder.why_gone() == ("", "")
    with connecting(recorder, world(), "of all"):
        pass
    say("done")


def test_what_a_caller_catches_is_no_failure(script: Script) -> None:
    with running_ranks(2, catch_and_go_on, script) as running:
        results = running.wait()
    values(results)
    assert all("done" in result.stderr and "it ends" not in result.stderr for result in results)


def fail_in_rank_1(rank: int) -> None:
    recorder = listening(rank)
    dist.barrier()  # from here on all ranks are between steps
    if rank == 1:
        throw()
    if rank == 0:
        stop_listening(recorder)  # this rank's training is over, but its process continues
        wait_until_told()
    time.sleep(60)


def test_a_rank_whose_training_is_over_does_not_end_with_the_others(script: Script) -> None:
    with running_ranks(3, fail_in_rank_1, script) as running:
        running.wait_until_it_says(0, HERE)
        running.wait_until_ended(1, 2)
        running.send_signal(0, signal.SIGUSR1)
        time.sleep(0.2)
        running.send_signal(0, signal.SIGTERM)
        results = running.wait()
    assert results[1].exit_code == results[2].exit_code == 1
    words = f"pipeline rank 1, {BETWEEN.format(1, 7)}: ValueError: the model is broken"
    words = words.replace(", local rank 1", "")
    assert re.search(f"between steps .*another rank has failed: {words}", results[2].stderr)
    assert "it ends" not in results[0].stderr
