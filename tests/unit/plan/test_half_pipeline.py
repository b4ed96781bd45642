"""`megatron-ext plan --half-pipeline`: p ranks, or half of them with twice the data parallelism."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
from typer.testing import CliRunner, Result

from megatron_ext.cli import app
from megatron_ext.cost_model.gpus import GPUS
from megatron_ext.cost_model.model_memory import TrainingState
from megatron_ext.cost_model.rates import Rates
from megatron_ext.cost_model.reductions import seconds_of_a_byte
from megatron_ext.cost_model.short_form import parse_model
from megatron_ext.planner import planner
from megatron_ext.planner.candidate import Candidate, RankMemory
from megatron_ext.planner.half_pipeline import division_of, half_of
from megatron_ext.planner.planner import make_plan
from megatron_ext.planner.training import TrainedModel, Training
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.placement import line

MODEL = parse_model("layers=16,hidden=1024,heads=8,sequence=2048,vocabulary=65536")
TEXT = "layers=16,hidden=1024,heads=8,sequence=2048,vocabulary=65536"
UNIT = partial(parse_costs, "f=1,i=1,w=1")


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Those that are compared, and do not search."""
    names = ["1f1b", "zb-v", "bitpipe", "chimera"]
    monkeypatch.setattr(planner, "all_specs", lambda: names)
    return names


def best_of_each(training: Training) -> dict[str, Candidate]:
    return {made.schedule: made for made in make_plan(training.variant).best_of_each}


def test_zb_v_beside_two_copies(families: list[str]) -> None:
    """What BitPipe's and Chimera's two copies take on eight GPUs, with 16 microbatches in all."""
    training = Training(8, 16, UNIT)
    half = half_of(training)
    assert str(division_of(training)) == "PP 8" and (half.ranks, half.microbatches) == (4, 8)
    whole, halves = best_of_each(training), best_of_each(half)
    took = {name: (whole[name].step, halves[name].step) for name in families}
    assert took["zb-v"] == (51.5, 51) and halves["zb-v"].report.span == 48
    assert took["bitpipe"] == (58.5, 57) and took["chimera"] == (69, 66)


def test_a_rank_of_half_holds_twice_the_parameters(families: list[str]) -> None:
    """And gradients; of the distributed optimizer's states, and of activations, as much."""
    state = TrainingState(distributed=True, data_parallel=2, expert_data_parallel=2)
    trained = TrainedModel(MODEL.model, MODEL.execution(), state, GPUS["h100"].rates())
    training = Training(4, 8, trained=trained)
    assert str(division_of(half_of(training))) == "PP 2 x DP 4"
    sides = best_of_each(training), best_of_each(half_of(training))

    def on_first_rank(name: str) -> list[RankMemory]:
        return [side[name].memory[0] for side in sides]  # type: ignore[index]

    before, after = on_first_rank("zb-v")  # without embedding and output layer
    assert after.model.weights == pytest.approx(2 * before.model.weights, rel=1e-3)
    assert after.model.gradients == pytest.approx(2 * before.model.gradients, rel=1e-3)
    assert after.model.optimizer == pytest.approx(before.model.optimizer, rel=1e-3)
    first, second = (rank.activations for rank in on_first_rank("1f1b"))
    assert second == pytest.approx(first, rel=0.01)
    outside = [
        one.seconds_outside_passes(side["1f1b"])
        for one, side in zip((training, half_of(training)), sides, strict=True)
    ]
    assert outside[1] > 1.5 * outside[0]  # twice the gradients are reduced


def test_gradients_are_reduced_round_a_ring() -> None:
    """Within a node, and between nodes by as many ports as the ring has there."""
    rates = Rates.as_a_whole(operations=1e12, network=1e9, host=1e9, peers=10e9)
    assert seconds_of_a_byte(4, 1, rates) == pytest.approx(3 / 4 / 10e9)
    # Eight to a node: nearly what peers carry.
    assert seconds_of_a_byte(16, 1, rates) == pytest.approx(15 / 16 / 8e9)
    # Tensor-parallel ranks fill the node.
    assert seconds_of_a_byte(4, 8, rates) == pytest.approx(3 / 4 / 1e9)
    assert seconds_of_a_byte(1, 1, rates) == 0


def test_costs_of_two_stages_in_one() -> None:
    costs = parse_costs("f=1/2/3/4,i=1,w=2,comm=0.5,d2h=4,head=3/3/3", line(4)).in_pairs()
    assert costs.without_vocabulary().seconds[Kind.FORWARD] == (3, 7)
    assert costs.seconds[Kind.FORWARD] == (3, 10) and costs.seconds[Kind.BACKWARD_WEIGHT] == (4, 7)
    assert costs.links.hop == 0.5 and costs.host is not None and costs.host.to_host == (8, 8)


def test_a_limit_in_microbatches_is_as_many_bytes() -> None:
    training = Training(8, 16, UNIT, limit=MemoryLimit(microbatches=8))
    assert half_of(training).limit == MemoryLimit(microbatches=4)
    in_bytes = replace(training, limit=MemoryLimit(bytes=8))
    assert half_of(in_bytes).limit == in_bytes.limit


def command(*words: str) -> Result:
    return CliRunner().invoke(app, ["plan", "--half-pipeline", "-m", "8", *words])


def test_half_is_an_alternative_like_the_others(families: list[str]) -> None:
    """Its messages are slow here, which half the ranks have fewer of."""
    costs = ("--pp", "4", "--costs", "f=1,i=1,w=1,comm=5")
    without = json.loads(CliRunner().invoke(app, ["plan", "-m", "8", *costs, "--json"]).stdout)
    assert not without["others"] and without["verdict"]["taken"]["division"] == ""
    made = json.loads(command(*costs, "--json").stdout)
    taken = made["verdict"]["taken"]
    assert (
        taken["division"] == "PP 2"
        and taken["seconds"] < 0.98 * without["verdict"]["taken"]["seconds"]
    )
    assert made["written"]["added"][:2] == ["--pipeline-model-parallel-size", "2"]
    assert " on PP 2" in command(*costs, "--all").stdout


def test_half_of_a_model_counts_its_reductions(families: list[str]) -> None:
    words = ("--pp", "4", "--gpu", "h100", "--dp", "2", "--distributed-optimizer", "--model", TEXT)
    made = json.loads(command(*words, "--json").stdout)
    halves = [one for one in made["others"] if one["division"]]
    assert {one["division"] for one in halves} == {"PP 2 x DP 4"}
    for one in halves:
        assert one["seconds"] > one["candidate"]["step"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--pp", "2"), "2 ranks have no half; give an even number of pipeline ranks, 4 or more"),
        (("--pp", "5"), "5 ranks have no half"),
        (("--pp", "4", "-m", "7"), "7 microbatches do not divide: give an even number"),
        (("--pp", "4", "--rank-speeds", "1,1,1,0.5"), "drop --slices, --pairs and --rank-speeds"),
    ],
)
def test_where_there_is_no_half(words: tuple[str, ...], why: str, families: list[str]) -> None:
    result = command(*words)
    assert result.exit_code == 2 and why in " ".join(result.output.split())
