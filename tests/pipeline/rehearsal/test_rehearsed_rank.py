"""Tests of one rank of a pipeline that is trained without the other ranks.

Under Megatron's --fake-process-group alone, a middle rank ends with exit code 0 and without a step,
and the first and the last rank have a NaN loss or norm.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_ext.rehearsal.message_times import MessageTimes
from megatron_ext.rehearsal.rank import _step_of, _TimedDeviceClock, _TimedStep
from megatron_ext.rehearsal.record import RankRecord, load_rank_record
from megatron_ext.rehearsal.request import BACKWARD, FORWARD, RECORD, PeerValues, sent_file
from megatron_ext.rehearsal.values import Values
from megatron_ext.runtime.device_progress import DeviceProgress
from megatron_ext.runtime.recording import Recording
from megatron_ext.schedule.action import parse_action
from tests.helpers.combinations import at_night
from tests.helpers.megatron_runs import model_flags
from tests.helpers.rehearsals import rehearsed, rehearsed_or_fail

RANKS = 4
MICROBATCHES = 8
COSTS = "f=1,i=1,w=1"


def flags(spec: str | None, **overrides: object) -> list[str]:
    costs = None if spec is None else COSTS
    return model_flags(
        **{
            "pipeline_model_parallel_size": RANKS,
            "num_layers": 8,
            "global_batch_size": MICROBATCHES,
            "pipeline_schedule": spec,
            "pipeline_costs": costs,
            "eval_iters": 1,
            **overrides,
        }
    )


def passes(record: RankRecord) -> str:
    return " ".join(str(one.action) for one in record.steps[-1].passes)


@pytest.mark.parametrize(
    ("spec", "rank", "overrides"),
    [
        (None, 1, {}),
        ("zb-v", 3, {"fp16": True}),
        *at_night(
            (None, 0, {}),
            (None, 3, {}),
            (None, 2, {"num_virtual_stages_per_pipeline_rank": 2}),
            (None, 3, {"num_virtual_stages_per_pipeline_rank": 2}),
            ("1f1b", 1, {}),
            ("zb-h1", 0, {"fp16": True, "loss_scale": 128}),
            ("interleaved-zb", 2, {"pipeline_p2p": "batched"}),
            ("zb-v", 1, {"pipeline_vocab_parallel": 1}),
            ("zb-v", 1, {"num_layers": 6, "pipeline_model_parallel_layout": "Et|t||t|t|t|t|L"}),
        ),
    ],
)
def test_a_rank_trains_alone_and_says_how_often(
    spec: str | None, rank: int, overrides: dict[str, object], tmp_path: Path
) -> None:
    record = rehearsed(rank, RANKS, flags(spec, **overrides), folder=tmp_path, steps=2)
    assert record == load_rank_record(tmp_path / RECORD)
    assert record.trained == 3
    assert (record.rank, record.pipeline_rank, record.world_size) == (rank, rank, RANKS)
    assert len(record.steps) == 2
    for step in record.steps:
        counts = {kind: sum(one.action.kind == kind for one in step.passes) for kind in "FIBW"}
        assert counts["F"] and counts["F"] % MICROBATCHES == 0
        assert counts["F"] == counts["B"] + counts["I"]
        assert 0 <= step.passes[0].start < step.passes[-1].end < step.seconds
        assert 0 <= step.host_seconds < step.seconds
    assert (record.digest == "") == (spec is None)
    assert all(0 < sent.rms < 1000 for sent in record.sent)


def test_a_direction_in_which_a_rank_sends_nothing_is_as_its_neighbour_says() -> None:
    values = Values({BACKWARD: 0.5, FORWARD: 0.5})
    x = torch.full((64, 64), math.nan)
    values.fill(BACKWARD, x)
    assert x.square().mean().sqrt() == pytest.approx(0.5, rel=0.05)
    values.note(FORWARD, torch.full((64, 64), 3.0))
    values.end_first_step()
    first = x.clone()
    values.fill(BACKWARD, x)
    assert x.square().mean().sqrt() == pytest.approx(0.5, rel=0.05)
    assert not torch.equal(x, first)  # no two messages have the same values
    values.fill(FORWARD, x)
    assert x.square().mean().sqrt() == pytest.approx(3.0, rel=0.05)


def test_real_values_are_rows_that_another_rank_has_sent() -> None:
    """With real values, a rehearsed rank receives activations that another rank has sent. Each
    token's row stays whole and the rows follow in the sent order, but each message begins with
    another row."""
    sent = torch.arange(128 * 8.0).view(16, 8, 8)
    values = Values({}, received={FORWARD: sent})
    got = [torch.full((16, 8, 8), math.nan) for _ in "12"]
    for x in got:
        values.fill(FORWARD, x)
        rows = x.view(128, 8)
        first = int(rows[0, 0]) // 8
        assert torch.equal(rows, sent.view(128, 8).roll(-first, 0))
    assert not torch.equal(*got)
    values.fill(BACKWARD, got[0])  # no rank has sent gradients
    assert got[0].square().mean().sqrt() == pytest.approx(1e-3, rel=0.2)
    assert values.pool_bytes > sent.nbytes
    short = torch.empty(4, 8, 4)
    with pytest.raises(ValueError, match="rows of 4 numbers, and the real values"):
        values.fill(FORWARD, short)
    zeros = Values({}, are_zeros=True)
    zeros.fill(BACKWARD, got[1])
    assert not got[1].any()


def test_a_rank_receives_what_another_has_sent(tmp_path: Path) -> None:
    """A rehearsed rank can compute with activations that another rehearsed rank has sent: rank 0
    saves those of its last warm-up step, and rank 1 receives them."""
    folders = [tmp_path / f"rank{rank}" for rank in range(2)]
    folders[0].mkdir()
    settings: dict[str, Any] = {"values": PeerValues.REAL}
    folders[1].mkdir()
    rehearsed(0, RANKS, flags("1f1b"), folder=folders[0], **settings)
    activations = sent_file(folders[0], FORWARD)
    assert not sent_file(folders[0], BACKWARD).exists()
    sent = torch.load(activations)
    torch.save(sent * 100, activations)  # so large that rank 1's output shows them
    received = {FORWARD: activations}
    record = rehearsed(1, RANKS, flags("1f1b"), folder=folders[1], received=received, **settings)
    (forward,) = (one for one in record.sent if one.direction == FORWARD)
    assert forward.shape == tuple(sent.shape)
    rms = float(sent.square().mean().sqrt())
    assert forward.rms > 50 * rms  # the residual stream passes the large values on
    assert record.pool >= sent.nbytes


def test_values_that_are_not_finite_end_the_first_step() -> None:
    values = Values({})
    values.note(FORWARD, torch.full((4,), math.inf))
    with pytest.raises(ValueError, match=r"sends \(forward\) are not finite in its first step"):
        values.end_first_step()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            {"lr": 1e30, "clip_grad": 0, "bf16": True},
            r"rank 3, in step 2: the step's lm loss is nan",
        ),
        (
            {"pipeline_schedule": "1f1b", "pipeline_metrics": True},
            r"rank 3, before its first step: --pipeline-metrics cannot be rehearsed",
        ),
        ({"train_iters": 0}, r"rank 3, before its first step: "),
    ],
)
def test_what_fails_names_the_rank_and_the_step(overrides: dict[str, object], words: str) -> None:
    result = rehearsed_or_fail(3, RANKS, flags(None, **overrides))
    assert result.exit_code == 1
    assert f"RehearsalError: {words}" in result.error


def test_waits_for_the_device_are_no_time_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host seconds that a rehearsed rank reports are the host's own work between passes. They
    exclude the time that the host waits for its device, here 0.05 s before each pass."""
    monkeypatch.setattr(DeviceProgress, "hold_back", lambda progress: time.sleep(0.05))
    (step,) = rehearsed(1, RANKS, flags("1f1b")).steps
    assert 0 < step.host_seconds < 0.05 * len(step.passes) / 2


class HostEvent:
    """Stand-in for `torch.cuda.Event` of a device that ends all work as soon as the host posts
    it."""

    def __init__(self, **options: object) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: HostEvent) -> float:
        return 1000 * (later.at - self.at)


def test_marks_of_a_gpu_end_with_the_last_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rehearsed step on a GPU ends with its last pass. Reading the GPU's events creates one more
    event, long after the passes, so the optimizer's seconds used to count as host time between
    passes."""
    monkeypatch.setattr(torch.cuda, "Event", HostEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    timed, began = _TimedStep(), time.perf_counter()
    timed.recording = Recording(0, _TimedDeviceClock(timed.host_times, MessageTimes()))
    for text in ("0F0", "0B0"):
        timed.recording.add_pass(parse_action(text), timed.recording.clock.record_event())
    time.sleep(0.2)
    step = _step_of(timed, began, 0.25)
    assert [str(one.action) for one in step.passes] == ["0F0", "0B0"]
    assert 0 <= step.passes[0].start <= step.passes[-1].end < 0.1
    assert 0 <= step.host_seconds < 0.1


def test_a_torch_whose_fake_group_leaves_results_uninitialised_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rehearsal is refused under a torch whose fake process group leaves results uninitialized:
    experts would get whatever the memory holds, which may be finite numbers."""
    monkeypatch.setattr(dist, "all_to_all_single", lambda *tensors: None)
    result = rehearsed_or_fail(0, 2 * RANKS, flags("1f1b"))
    words = "its fake process group leaves the results of all-to-all uninitialised"
    assert result.exit_code == 1 and words in result.error
