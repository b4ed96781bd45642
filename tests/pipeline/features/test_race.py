"""Tests of a race of schedules within a real training (``--pipeline-race``).

The clock is emulated: a step takes the time that its program is simulated to take, so nothing
depends on other work of the machine. The race is short.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megatron_ext.adapter.programs import Programs
from megatron_ext.adapter.step import pipeline_training
from megatron_ext.adapter.training_globals import current_iteration
from megatron_ext.compile.program.simulate import step_seconds
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.registry import choose
from megatron_ext.config import PipelineConfig
from megatron_ext.features.race.adapter import step_race, turn
from megatron_ext.race import race_texts, rounds
from megatron_ext.race.race_record import RaceFigures
from megatron_ext.runtime.host import host_memory as host_memory
from megatron_ext.runtime.host.host_memory import HostMemory
from tests.helpers.combinations import nightly
from tests.helpers.megatron_runs import (
    Run,
    assert_same,
    losses,
    model_flags,
    train,
    train_or_fail,
)
from tests.helpers.ranks import run_ranks, values
from tests.helpers.stages import program_for

Flags = dict[str, object]

ROUNDS, TIMED = 2, 1
ROUND = 4 * (rounds.WARM_UP + TIMED)  # iterations of a round between two schedules
WHOLE = step_race.FIRST + ROUNDS * ROUND + 1  # iterations until the race is over, and one more
COSTS = "f=10,i=14,w=6"


class EmulatedClock:
    """Clock that shows the simulated seconds of this rank's steps so far."""

    now = 0.0

    def record_event(self) -> float:
        return EmulatedClock.now

    def read(self, events: Sequence[float]) -> list[float]:
        return list(events)


def shorten_and_emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the races of ranks that are forked from now on, and emulate their clocks."""
    run_passes = pipeline_training.run_passes

    @functools.wraps(run_passes)
    def emulating(step: Any, *args: Any) -> Any:
        EmulatedClock.now += step_seconds(step.program, step.program.problem.costs)
        return run_passes(step, *args)

    monkeypatch.setattr(pipeline_training, "run_passes", emulating)
    monkeypatch.setattr(turn, "clock_of", lambda device: EmulatedClock())
    for module in (rounds, turn, step_race, race_texts):
        monkeypatch.setattr(module, "ROUNDS", ROUNDS, raising=False)
        monkeypatch.setattr(module, "TIMED", TIMED, raising=False)


@pytest.fixture(autouse=True)
def short_and_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_and_emulate(monkeypatch)


def flags(iterations: int, **more: object) -> list[str]:
    common: Flags = {
        "global_batch_size": 4,
        "pipeline_model_parallel_size": 2,
        "train_iters": iterations,
        "lr_decay_iters": 1000,
    }
    return model_flags(**common | more)


def run(ranks: int, iterations: int, **more: object) -> list[Run]:
    return train(ranks, flags(iterations, **more))


def said(capfd: pytest.CaptureFixture[str]) -> str:
    """Return the lines that the race has printed since the last call."""
    out = capfd.readouterr().out
    return "\n".join(line for line in out.splitlines() if "megatron_ext: race" in line)


# ---- a race changes no number of the training


@nightly("test_the_next_start_knows_what_was_measured is stock's, too, over two starts")
@pytest.mark.parametrize(
    ("race", "ranks", "alone", "winner", "more"),
    [
        (
            "zb-2p 1f1b",
            2,
            None,
            "zb-2p",
            {"pipeline_p2p": "batched", "eval_iters": 1, "eval_interval": 7},
        ),
        ("zb-v", 2, "1f1b-v", "zb-v", {"bf16": True, "attention_dropout": 0.1}),
        (
            "zb-v",
            4,
            "1f1b-v",
            "zb-v",
            {
                "use_distributed_optimizer": True,
                "overlap_grad_reduce": True,
                "overlap_param_gather": True,
                "global_batch_size": 8,
            },
        ),
        ("interleaved-zb", 2, None, "interleaved-zb", {}),
        ("gis", 4, None, "gis", {"tensor_model_parallel_size": 2}),
        ("zb-2p", 2, "1f1b", "no schedule", {"pipeline_vocab_parallel": "2"}),
        ("zb-h1", 2, None, "zb-h1", {"pipeline_activation_offload": "half"}),
    ],
)
def test_a_race_changes_nothing_to_the_last_bit(
    race: str,
    ranks: int,
    alone: str | None,
    winner: str,
    more: Flags,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A training with a race equals the one without a race, to the last bit: stock's, or under a V
    or a split vocabulary the baseline's. The expected schedule wins the race, or none."""
    ours = {name: value for name, value in more.items() if name.startswith("pipeline_")}
    theirs = {name: value for name, value in more.items() if name not in ours or alone}
    if race in ("interleaved-zb", "gis"):
        theirs["num_virtual_stages_per_pipeline_rank"] = 2
    iterations = WHOLE + 4  # an evaluation takes one iteration from the turn in which it falls
    reference = run(ranks, iterations, pipeline_schedule=alone, **theirs)
    said(capfd)
    costs = COSTS + ",d2h=5" if "pipeline_activation_offload" in more else COSTS
    runs = run(ranks, iterations, pipeline_race=race, pipeline_costs=costs, **more)
    assert len(losses(runs)) == iterations
    assert_same(runs, reference)
    told = said(capfd)
    assert f"race is over: {winner} is " in told


def test_a_schedule_that_loses_is_dropped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schedule that runs one microbatch after the other, on one rank at a time, is dropped from
    the race. After a race that only reports, the training continues under the baseline. The gain of
    zb-h1 is reported as noise, because the prediction here gives the baseline no bubble."""
    for module in (rounds, step_race, race_texts):
        monkeypatch.setattr(module, "ROUNDS", 3)
    no_bubble = RaceFigures(0.0, 0.0, None, None, 1)
    monkeypatch.setattr(step_race, "_beside_prediction", lambda *_: no_bubble)
    table = tmp_path / "one-by-one.csv"
    rows = [",".join(f"{stage}F{m},{stage}B{m}" for m in range(4)) for stage in range(2)]
    table.write_text("\n".join(rows) + "\n")
    iterations = step_race.FIRST + 2 * 6 * (rounds.WARM_UP + TIMED) + ROUND + 2
    runs = run(
        2,
        iterations,
        pipeline_race=f"zb-h1 {table}",
        pipeline_race_then="report",
        pipeline_costs=COSTS,
    )
    assert len(losses(runs)) == iterations
    told = said(capfd)
    assert (
        f"round 2 of 3, speed relative to 1f1b (median so far): zb-h1 1.087, {table} is dropped (0."
        in told
    )
    assert "round 3 of 3" in told
    assert re.search(r"race is over: zb-h1 is .* the training goes on under 1f1b", told)
    assert "race: 1.087 times as fast is noise" in told


# ---- checkpoints, and the next start of the training


def test_the_next_start_knows_what_was_measured(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A start of a training knows the results of its race so far. A start from a checkpoint in
    the middle of the second round knows the first round, and a start after the race knows the
    winner."""
    race: Flags = {"pipeline_race": "zb-2p", "pipeline_costs": COSTS}
    saved_at = step_race.FIRST + ROUND + 3
    iterations = saved_at + step_race.FIRST + ROUND + 2
    whole = run(2, iterations)
    said(capfd)
    folder: Flags = {"save": tmp_path, "save_interval": saved_at}
    run(2, iterations, exit_interval=saved_at, **race, **folder)
    told = said(capfd)
    assert "1 of 2 rounds; a start from a checkpoint in" in told
    record = json.loads((tmp_path / "race.json").read_text())
    assert len(record["rounds"]) == 1 and record["winner"] is None
    resumed = run(2, iterations, **race, **folder, load=tmp_path)
    assert_same(resumed, whole)
    told = said(capfd)
    assert "2 rounds, 1 of them from an earlier start" in told
    assert "race is over: zb-2p is" in told
    record = json.loads((tmp_path / "race.json").read_text())
    assert len(record["rounds"]) == 2 and record["winner"] == "zb-2p"
    more = {"load": tmp_path, "ckpt_step": saved_at, "exit_interval": saved_at + 2}
    again = run(2, iterations, **race, **more)
    assert losses(again) == losses(whole)[saved_at:][:2]
    told = said(capfd)
    assert "race: zb-2p has won already, and this goes on under zb-2p" in told
    assert "rounds" not in told


@nightly("test_the_next_start_knows_what_was_measured, of a job that ends by itself")
def test_a_rank_that_is_killed_takes_nothing_with_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a rank is killed in the middle of a turn of a race, after a checkpoint, the job ends. The
    next start still knows the rounds before."""
    race: Flags = {"pipeline_race": "zb-2p", "pipeline_costs": COSTS}
    saved_at = step_race.FIRST + ROUND + 1
    folder: Flags = {"save": tmp_path, "save_interval": saved_at}
    run_passes = pipeline_training.run_passes

    def run_or_die(step: Any, *args: Any) -> Any:
        if current_iteration() == saved_at + 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return run_passes(step, *args)

    with monkeypatch.context() as patch:
        patch.setattr(pipeline_training, "run_passes", run_or_die)
        first, last = train_or_fail(2, flags(WHOLE, **race, **folder))
    assert last.exit_code == -signal.SIGKILL
    # The rank that was not killed failed in a message.
    assert first.exit_code == 1 and "pipeline rank 0, in 0" in first.error
    said(capfd)
    resumed = run(2, WHOLE, **race, load=tmp_path, exit_interval=saved_at + 3)
    assert len(losses(resumed)) == 3
    assert "2 rounds, 1 of them from an earlier start" in said(capfd)


def test_what_was_measured_of_something_else_does_not_count(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    race: Flags = {"pipeline_race": "zb-2p", "pipeline_costs": COSTS}
    (tmp_path / "race.json").write_text(
        json.dumps(
            {
                "version": 2,
                "fingerprint": {"GPU": "8 x H100"},
                "rounds": [],
                "figures": {},
                "winner": "zb-2p",
            }
        )
    )
    run(2, 3, load=tmp_path, **race)
    told = said(capfd)
    assert "does not count: GPU was 8 x H100 there and is 2 x CPU (no GPU) here" in told
    assert "race of zb-2p against 1f1b (stock's order)" in told
    assert "race has not ended: the training has, after 0 of 2 rounds" in told


@pytest.mark.parametrize(
    ("folder", "is_one"), [("msc://profile/run", False), ("runs/1", True), (None, False)]
)
def test_an_address_is_no_folder(
    folder: str | None, is_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No record of a race is written locally if the training saves to an address such as
    ``msc://...``. The record used to be written into a local folder named ``msc:``."""
    args = SimpleNamespace(save=folder)
    monkeypatch.setattr(step_race, "training_global", lambda name: args)
    assert step_race._folder("save") == (Path(folder) if folder and is_one else None)


@nightly(
    "test_what_was_measured_of_something_else_does_not_count, and tests/unit reads such records"
)
def test_a_broken_record_is_measured_anew(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A start whose race record is broken measures the schedules again. A schedule with negative
    seconds in the record used to win the race, at each later start."""
    race: Flags = {"pipeline_race": "zb-2p", "pipeline_costs": COSTS}
    saved_at = step_race.FIRST + ROUND + 3
    folder: Flags = {"save": tmp_path, "save_interval": saved_at}
    run(2, WHOLE, exit_interval=saved_at, **race, **folder)
    record = json.loads((tmp_path / "race.json").read_text())
    record["rounds"][0]["zb-2p"][0] = -5.0
    (tmp_path / "race.json").write_text(json.dumps(record))
    said(capfd)
    run(2, WHOLE, **race, load=tmp_path, exit_interval=saved_at + step_race.FIRST + 2)
    told = said(capfd)
    assert "race: measured anew: race file" in told and "a turn of zb-2p is -5.0" in told
    assert "from an earlier start" not in told


def test_a_full_disk_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "race.json").mkdir()
    saving: Flags = {"save": tmp_path, "save_interval": 1000, "exit_interval": WHOLE}
    words = flags(1000, pipeline_race="zb-2p", pipeline_costs=COSTS, no_save_optim=True, **saving)
    results = train_or_fail(2, words)
    assert len(losses(values(results))) == WHOLE
    assert results[0].stderr.count("what the race measures is not written to") == 1
    assert "race is over: zb-2p is" in said(capfd)


# ---- the steps that a race times


def test_it_begins_when_costs_are_measured(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A race starts after costs are measured under a schedule that splits the backward pass.
    Otherwise the share of W in a backward pass would be a guess."""
    costs = tmp_path / "costs.json"
    run(2, 8, pipeline_race="zb-2p", pipeline_costs=f"profile:{costs}")
    out = capfd.readouterr().out
    assert out.index("zb-2p, measured costs: ") < out.index("race of zb-2p against 1f1b")
    assert costs.exists()


@nightly("test_callers.py has a race whose steps come to other sizes")
def test_a_batch_that_grows_begins_it_anew(capfd: pytest.CaptureFixture[str]) -> None:
    """A race starts anew when the batch size grows, because a round compares steps of one size."""
    run(
        2,
        12,
        global_batch_size=None,
        step_batch_size_schedule="0:2 192:4",
        pipeline_race="zb-2p",
        pipeline_costs=COSTS,
    )
    told = said(capfd)
    assert told.count("race of zb-2p against 1f1b") == 2
    assert told.count("has changed, and it begins anew") == 1


# ---- candidates that a race refuses


def test_a_candidate_that_a_rank_has_no_host_memory_for_takes_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A candidate of a race that does not fit into host memory reserves none. Ranks that had enough
    memory used to go on counting the refused candidate's share, so the next candidate, which fits,
    was refused. The refused program also used to count as known, so it was not checked a second
    time."""
    free, gib = 8.5, 2**30
    monkeypatch.setattr(host_memory, "available_bytes", lambda: int(free * gib))
    monkeypatch.setattr(host_memory.socket, "gethostname", lambda: "node7")
    monkeypatch.setattr(host_memory, "planned_bytes", lambda row, costs: row * gib)
    needs = {"1f1b": 2, "zb-2p": 5, "zb-h1": 4}  # GiB of host memory on each of two ranks
    made = {spec: program_for(choose(spec), 2, 4) for spec in needs}

    def on_rank(rank: int) -> list[str]:
        config = PipelineConfig.parse(race="zb-2p zb-h1")
        programs, memory = Programs(config, lambda *_: {}), HostMemory()
        known: Any = programs._programs

        def make() -> Program:
            spec = programs.resolved_spec.spec
            memory.check(needs[spec], None)  # type: ignore[arg-type]
            known[spec] = made[spec]
            return made[spec]

        race = step_race.StepRace(config, programs)
        whys = [race._why_not(spec, make, memory) for spec in needs]
        assert set(race._made) == {"1f1b", "zb-h1"} and memory.planned == 4 * gib
        assert known.keys() == {"1f1b", "zb-h1"}
        return whys

    for fits, does_not, fits_too in values(run_ranks(2, on_rank)):
        assert fits == "" and fits_too == ""
        assert does_not.startswith("node7: its ranks need 10 GiB of host memory")


def test_who_would_change_the_losses_is_refused(tmp_path: Path) -> None:
    """A race refuses a candidate that would change the losses: a schedule file whose microbatches
    are not in order sums gradients in another order."""
    table = tmp_path / "backwards.csv"
    order = (1, 0, 2, 3)
    rows = [
        ",".join([*(f"{stage}F{m}" for m in order), *(f"{stage}B{m}" for m in order)])
        for stage in range(2)
    ]
    table.write_text("\n".join(rows) + "\n")
    first, _ = train_or_fail(2, flags(3, pipeline_race=str(table), pipeline_costs=COSTS))
    assert "does not run the microbatches of each stage in order" in first.stderr
