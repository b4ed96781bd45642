"""Tests of a rank that fails, or is killed, before all ranks are connected: the other ranks report
it and end.

Ranks used to watch for failures only once all connections existed. Before that the others waited
for torch's timeout, ten minutes or more, without a message.
"""

from __future__ import annotations

import functools
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch

from megatron_ext.adapter.rank_settings.launch_facts import refuse_other_launches
from megatron_ext.adapter.step import pipeline_training
from megatron_ext.compile.program.communicators import COLLECTIVES
from megatron_ext.compile.program.graph import Channel, channels
from megatron_ext.compile.registry import choose
from megatron_ext.config import PipelineConfig
from megatron_ext.runtime import watchdog
from megatron_ext.runtime.messages import channels as channels_module
from megatron_ext.runtime.messages import collectives as collectives_module
from megatron_ext.runtime.messages.channels import Channels
from megatron_ext.runtime.messages.connecting import connecting
from megatron_ext.runtime.messages.peer_call import PeerFailure
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.schedule import Schedule
from tests.helpers.combinations import at_night
from tests.helpers.ranks import Script, agent_store, run_ranks, running_ranks, values
from tests.helpers.stages import world
from tests.pipeline.failures.test_bad_days import Training, pipeline_flags
from tests.pipeline.failures.test_faults import HERE, kill, say, throw

pytestmark = pytest.mark.real_time

RANKS, FAILING = 3, 1
SOON = 20.0  # seconds on a busy machine; Megatron's own timeout is 10 minutes


@dataclass(frozen=True)
class WhileConnecting:
    """Fault that rank `FAILING` runs before it connects, in a connection, or between two
    connections."""

    where: str
    fault: Callable[[], None]

    def install(self, rank: int) -> None:
        watchdog.STUCK_SECONDS = 0.5
        if rank != FAILING:
            return
        if self.where == "before all":
            Recorder.before_exchange = self._fail  # type: ignore[method-assign]
        elif self.where == "before the first":
            pipeline_training.connect = self._fail
        elif self.where == "in the first":
            Channels._use_once = self._fail  # type: ignore[method-assign]
        elif self.where == "between two":
            made = channels_module.make_device_groups
            calls: list[None] = []

            def fail_at_the_second(*args: Any) -> Any:
                calls.append(None)
                return made(*args) if len(calls) == 1 else self._fail()

            channels_module.make_device_groups = fail_at_the_second  # type: ignore[assignment]
        else:
            assert self.where == "before a collective's"
            collectives_module.connecting = self._fail

    def _fail(self, *args: Any, **kwargs: Any) -> Any:
        say(HERE)
        self.fault()
        raise AssertionError("no fault")


# Position of the failed rank as the other ranks report it, by the moment of the fault.
PLACES = {
    "before the first": "the connecting of the ranks",
    "in the first": r"the connection SEND_F 0>1",
    "between two": r"the connection SEND_\w \d>\d",
    "before a collective's": "the connecting of the ranks",
}


def flags_of(where: str) -> list[str]:
    flags: dict[str, object] = {"pipeline_schedule": "zb-h1"}
    if where == "before a collective's":
        flags["pipeline_vocab_parallel"] = 1
    return pipeline_flags(RANKS, 6, **flags)


@pytest.mark.parametrize(
    "where", ["between two", *at_night("before the first", "in the first", "before a collective's")]
)
def test_every_rank_hears_of_one_that_fails_while_it_connects(script: Script, where: str) -> None:
    with agent_store() as port:
        run = Training(RANKS, port, flags_of(where), WhileConnecting(where, throw))
        with running_ranks(RANKS, run, script, connect=False) as running:
            results = running.wait()
    failed = results[FAILING]
    assert failed.exit_code == 1 and "ValueError: the model is broken" in failed.stderr
    place = f"pipeline rank {FAILING}, in {PLACES[where]} "
    assert re.search(f"megatron_ext: {place}", failed.stderr), failed.stderr
    for rank in {*range(RANKS)} - {FAILING}:
        result = results[rank]
        assert result.exit_code == 1, result.stderr
        assert result.seconds - failed.seconds < SOON
        host = re.escape(socket.gethostname())
        assert re.search(
            rf"another rank ha[sd] failed: {place}\[pipeline rank {FAILING} is global rank "
            rf"{FAILING}, local rank {FAILING} on {host}; .*\]: ValueError: the model is broken",
            result.stderr,
        ), result.stderr


@pytest.mark.parametrize(
    ("where", "waits"),
    [
        # Both neighbours of the killed rank wait for their connection to it.
        ("before the first", {0: r"SEND_\w \d>\d to pipeline rank 1", 2: r"SEND_\w \d>\d to"}),
        *at_night(
            ("before all", dict.fromkeys((0, 2), "of the pipeline with global rank 1")),
            ("between two", {2: r"SEND_\w \d>\d to pipeline rank 1"}),
            ("before a collective's", {0: f"{COLLECTIVES[0]} with global rank 1"}),
        ),
    ],
)
def test_one_that_is_killed_while_it_connects_is_named(
    script: Script, where: str, waits: dict[int, str]
) -> None:
    """The other ranks name a rank that was killed while it connected, and the connection that they
    wait for. They do so in the line that says that they may hang, and again when a launcher ends
    them. A killed rank cannot report anything by itself."""
    with agent_store() as port:
        run = Training(RANKS, port, flags_of(where), WhileConnecting(where, kill))
        with running_ranks(RANKS, run, script, connect=False) as running:
            running.wait_until_ended(FAILING)
            for rank in waits:
                running.wait_until_it_says(rank, "it may hang [")
                running.send_signal(rank, signal.SIGTERM)
            running.wait_until_ended(*waits)
            results = running.wait(SOON)
    for rank, words in waits.items():
        result = results[rank]
        assert result.exit_code == 128 + signal.SIGTERM
        waiting = rf"pipeline rank {rank} waiting for the connection {words}"
        for line in (rf"{waiting}.* for \d\.\d s: it may hang \[.*", rf"got SIGTERM: {waiting}.*"):
            assert len(re.findall(f"^megatron_ext: {line}$", result.stderr, re.MULTILINE)) == 1, (
                result.stderr
            )
        # The host of the killed rank is known from the first exchange on.
        peer = f"pipeline rank {FAILING} is global rank {FAILING}"
        assert ("to pipeline rank 1" not in words) or peer in result.stderr


# --- connections without a training


def of_schedule(spec: str, ranks: int) -> set[Channel]:
    return channels(Schedule(spec, choose(spec).place(ranks), ((),) * ranks))


def short_timeout(seconds: float) -> None:
    world()._get_backend(torch.device("cpu")).options._timeout = timedelta(seconds=seconds)


def test_a_rank_that_never_comes_is_named_at_the_timeout() -> None:
    """A rank that never connects is named at the timeout by the rank that waits for it. torch's own
    error names neither of the two. Other ranks, which wait for the waiting rank, end when that rank
    has ended."""

    def on_rank(rank: int) -> str:
        short_timeout(0.5)
        if rank == 2:
            time.sleep(2.0)
            return ""
        with pytest.raises(PeerFailure) as raised:
            Channels(world(), of_schedule("zb-h1", 3), torch.device("cpu"))
            with connecting(Recorder(rank), world(), "of all"):
                pass
        return str(raised.value)

    first, second, _ = values(run_ranks(3, on_rank))
    assert "waiting for the connection SEND_" in second and "global rank 2 did not come" in second
    assert "waiting for the connection of all, to which global rank" in first and "2 did" in first


def test_a_rank_that_waits_for_others_ends_when_it_hears_of_a_failure() -> None:
    """A rank that waits for connections ends when it hears of another rank's failure. The error is
    raised in the main thread, so the cleanup code of the rank's caller runs."""

    def on_rank(rank: int) -> str:
        if rank == 0:
            return ""
        recorder = Recorder(rank)
        hear = functools.partial(setattr, recorder, "interruption", "a disk is full")
        threading.Timer(0.2, hear).start()
        heard = pytest.raises(PeerFailure, match="when another rank had failed: a disk is full")
        for _ in ("while it waits", "before"):
            entered = False
            with heard, connecting(recorder, world(), "of all"):
                entered = True
            assert not entered, "without the others"
        assert not recorder.in_step and recorder.has_failed and recorder.position is None
        return "heard"

    assert values(run_ranks(2, on_rank)) == ["", "heard"]


def test_connections_are_made_anew_in_a_second_training() -> None:
    """The ranks connect anew in a second training of the same processes: arrivals of the first
    training must not count for the second."""

    def on_rank(rank: int) -> list[float]:
        times = []
        for _ in range(2):
            if rank == 0:
                time.sleep(0.3)
            start = time.monotonic()
            with connecting(Recorder(rank), world(), "of all"):
                times.append(time.monotonic() - start)
        return times

    _, waited = values(run_ranks(2, on_rank))
    assert all(seconds > 0.1 for seconds in waited), waited


def test_a_restart_meets_nothing_of_the_start_before_it() -> None:
    """Ranks that torchrun restarts do not meet keys of the start before, although the store is the
    same. If rank 1 died while rank 0 was connecting, both used to go wrong after each restart: rank
    0 waited until the timeout for an arrival of rank 1 under another number, and rank 1 took the
    earlier arrival of rank 0 for a new one."""

    def on_rank(rank: int) -> str:
        short_timeout(5.0)
        refuse_other_launches(PipelineConfig(schedule="1f1b"))
        if rank == 0:
            recorder = Recorder(rank)
            recorder.interruption = "rank 1 has died"
            with pytest.raises(PeerFailure), connecting(recorder, world(), "of all"):
                pass
        refuse_other_launches(PipelineConfig(schedule="1f1b"))
        with connecting(Recorder(rank), world(), "of all"):
            return "connected"

    assert values(run_ranks(2, on_rank)) == ["connected"] * 2


def test_a_connection_that_was_made_is_cut_while_others_are_being_made() -> None:
    """A failure cuts connections that are finished while others are still being made, because each
    connection is registered as soon as it exists."""

    def on_rank(rank: int) -> list[bool]:
        recorder = Recorder(rank)
        ways = of_schedule("zb-h1", 2)
        seen: list[int] = []
        use_once = Channels._use_once

        def note(self: Channels, channel: Channel) -> None:
            use_once(self, channel)
            seen.append(len(self._groups))
            assert recorder.connections() == [self]

        Channels._use_once = note  # type: ignore[method-assign]
        made = Channels(world(), ways, torch.device("cpu"), None, recorder)
        assert seen == [1, 2] and {way.send for way in ways} == {Kind.SEND_F, Kind.SEND_B}
        del made
        return [recorder.connections() == []]

    assert values(run_ranks(2, on_rank)) == [[True], [True]]
