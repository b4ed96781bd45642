"""Tests of the request and the record of a rehearsed rank, which travel between processes as
files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.rehearsal.record import (
    RankRecord,
    RehearsedPass,
    RehearsedStep,
    SentValues,
    load_rank_record,
    save_rank_record,
)
from megatron_ext.rehearsal.request import (
    PeerValues,
    RankRequest,
    ReplayRequest,
    load_request,
    save_request,
)
from megatron_ext.schedule.action import parse_action

STEP = RehearsedStep(
    (
        RehearsedPass(parse_action("0F0.1", 2), 0.5, 0.75),
        RehearsedPass(parse_action("0B0.0", 2), 0.75, 1.5),
    ),
    seconds=1.25,
    host_seconds=0.125,
)
RECORD = RankRecord(
    rank=3,
    world_size=8,
    pipeline_rank=3,
    schedule="zb-v",
    digest="abc",
    trained=5,
    steps=(STEP, replace(STEP, seconds=1.5)),
    allocated=1 << 40,
    pool=7,
    sent=(SentValues("forward", 0.25, (16, 2, 8), "torch.bfloat16"),),
)


def test_a_request_comes_back(tmp_path: Path) -> None:
    request = RankRequest(
        rank=5,
        world_size=8,
        script="pretrain_gpt.py",
        arguments=("--pipeline-costs", "a b.json"),
        folder=tmp_path / "new" / "rank",
        neighbour=tmp_path / "other.json",
        environment={"NCCL_DEBUG": "WARN"},
        values=PeerValues.REAL,
        received={"forward": tmp_path / "sent_forward.pt"},
        replay=ReplayRequest({"SEND_F 0>1": (0.5, 1.25)}, ctas=4, has_blocks=False),
    )
    assert load_request(save_request(request)) == request
    bare = replace(request, neighbour=None, replay=None)
    assert load_request(save_request(bare)) == bare


def test_a_record_comes_back(tmp_path: Path) -> None:
    save_rank_record(RECORD, tmp_path / "record.json")
    found = load_rank_record(tmp_path / "record.json")
    # Actions with a slice are compared by their texts, which are equal if the slices are.
    assert [str(one.action) for one in found.steps[0].passes] == ["0F0.1", "0B0.0"]
    assert replace(found, steps=()) == replace(RECORD, steps=())
    assert [step.seconds for step in found.steps] == [1.25, 1.5]
    assert found.steps[0].passes[1].end == 1.5


def _passes(data: dict[str, Any], passes: Any) -> None:
    data["steps"][0]["passes"] = passes


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda data: data.pop("version"), "not of version 1: rehearse the schedule"),
        (lambda data: data.update(trained="five"), "trained is 'five'; a whole number"),
        (lambda data: data.update(steps=3), "steps is 3; a list of objects"),
        (lambda data: _passes(data, [["0F0.0", 1.0]]), "'passes' must be a list of actions"),
        (lambda data: _passes(data, [["0F0", "x", 1]]), "'passes' must be a list of actions"),
        (lambda data: _passes(data, [["0X0", 0, 1]]), "'0X0' is not an action"),
        (lambda data: _passes(data, [["0F0", 2, 1]]), "not in the order of their starts"),
        (
            lambda data: _passes(data, [["0F0", 2, 3], ["0B0", 1, 4]]),
            "not in the order of their starts",
        ),
    ],
)
def test_a_damaged_record_names_its_mistake(tmp_path: Path, damage: Any, told: str) -> None:
    path = tmp_path / "record.json"
    save_rank_record(RECORD, path)
    data = json.loads(path.read_text())
    damage(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=told):
        load_rank_record(path)
