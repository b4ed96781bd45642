"""`megatron-ext plan --half-pipeline`: p ranks, or half of them with twice the data parallelism."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
from typer.testing import CliRunner, Result

from megatron_ext.cli import app
from megatron_ext.cost_model.gpus import GPUS
from megatron_ext.cost_model.model import stages_of
from megatron_ext.cost_model.model_memory import TrainingState
from megatron_ext.cost_model.rates import Rates
from megatron_ext.cost_model.reductions import Reduction, reductions_of_ranks
from megatron_ext.cost_model.short_form import parse_model
from megatron_ext.planner import planner
from megatron_ext.planner.candidate import Candidate, RankMemory
from megatron_ext.planner.half_pipeline import compare_halves
from megatron_ext.planner.training import TrainedModel, Training
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.limit import MemoryLimit, parse_limit
from megatron_ext.schedule.placement import line
from megatron_ext.schedule.problem import VocabularyParallel

MODEL = parse_model("layers=16,hidden=1024,heads=8,sequence=2048,vocabulary=65536")
TEXT = "layers=15,hidden=1024,heads=8,sequence=2048,vocabulary=65536"
UNIT = partial(parse_costs, "f=1,i=1,w=1")


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Those that are compared, and do not search."""
    names = ["1f1b", "zb-v", "bitpipe", "chimera"]
    monkeypatch.setattr(planner, "all_specs", lambda: names)
    return names


def there(candidate: Candidate | None) -> Candidate:
    assert candidate is not None
    return candidate


def test_zb_v_beside_two_copies(families: list[str]) -> None:
    """What BitPipe's and Chimera's two copies take on eight GPUs, with 16 microbatches in all."""
    halves = compare_halves(Training(8, 16, UNIT))
    assert str(halves.half.division) == "PP 4 x DP 2" and halves.half.division.microbatches == 8
    took = {
        name: (there(whole).step, there(half).step, there(half).report.span)
        for name, whole, half in halves.rows
    }
    assert took["zb-v"] == (51.5, 51, 48)
    assert took["bitpipe"][:2] == (58.5, 57) and took["chimera"][:2] == (69, 66)
    assert next(name for name, _, _ in halves.rows) == "zb-v" and took.keys() == set(families)


def test_a_rank_of_half_holds_twice_the_parameters(families: list[str]) -> None:
    """And gradients; of the distributed optimizer's states, and of activations, as much."""
    state = TrainingState(distributed=True, data_parallel=2, expert_data_parallel=2)
    trained = TrainedModel(MODEL.model, MODEL.execution(), state, GPUS["h100"].rates())
    rows = {name: both for name, *both in compare_halves(Training(4, 8, trained=trained)).rows}

    def on_first_rank(name: str) -> list[RankMemory]:
        memory = [there(candidate).memory for candidate in rows[name]]
        return [ranks[0] for ranks in memory if ranks is not None]

    before, after = on_first_rank("zb-v")  # without embedding and output layer
    assert after.model.weights == pytest.approx(2 * before.model.weights, rel=1e-3)
    assert after.model.gradients == pytest.approx(2 * before.model.gradients, rel=1e-3)
    assert after.model.optimizer == pytest.approx(before.model.optimizer, rel=1e-3)
    first, second = (rank.activations for rank in on_first_rank("1f1b"))
    assert second == pytest.approx(first, rel=0.01)


def reduction(state: TrainingState, tensor_parallel: int = 1) -> Reduction:
    """That of the second of two ranks, which has an output layer."""
    rates = Rates.as_a_whole(operations=1e12, network=1e9, host=1e9, peers=10e9)
    return reductions_of_ranks(
        MODEL.model,
        stages_of(MODEL.model, [8, 8]),
        MODEL.execution(tensor_parallel),
        line(2),
        VocabularyParallel.NONE,
        state,
        rates,
    )[1]


def test_gradients_are_reduced_and_parameters_gathered() -> None:
    """Round a ring within a node, and between nodes by as many ports as the ring has there."""
    elements = 8 * (12 * 1024**2 + 2 * 1024) + 1024 + 65536 * 1024
    near = TrainingState(distributed=True, data_parallel=4)
    assert reduction(near).gradients == pytest.approx(4 * elements * 3 / 4 / 10e9)
    assert reduction(near).parameters == pytest.approx(2 * elements * 3 / 4 / 10e9)
    far = replace(near, data_parallel=16)  # eight to a node: nearly what peers carry
    assert reduction(far).gradients == pytest.approx(4 * elements * 15 / 16 / 8e9)
    alone = replace(near, data_parallel=4)  # tensor-parallel ranks fill the node
    assert reduction(alone, 8).gradients == pytest.approx(4 * elements * 3 / 4 / 8 / 1e9, rel=1e-3)
    whole = reduction(replace(near, distributed=False))
    assert whole == Reduction(2 * reduction(near).gradients, 0.0)
    assert reduction(TrainingState(distributed=True)).total == 0


def test_costs_of_two_stages_in_one() -> None:
    costs = parse_costs("f=1/2/3/4,i=1,w=2,comm=0.5,d2h=4,head=3/3/3", line(4)).in_pairs()
    assert costs.without_vocabulary().seconds[Kind.FORWARD] == (3, 7)
    assert costs.seconds[Kind.FORWARD] == (3, 10) and costs.seconds[Kind.BACKWARD_WEIGHT] == (4, 7)
    assert costs.links.hop == 0.5 and costs.host is not None and costs.host.to_host == (8, 8)


def test_a_limit_in_microbatches_is_as_many_bytes(families: list[str]) -> None:
    halves = compare_halves(Training(8, 16, UNIT, limit=MemoryLimit(microbatches=8)))
    for side, limit in ((halves.whole, 8), (halves.half, 4)):
        best = there(side.plan.best)
        assert best.limit == MemoryLimit(microbatches=limit) == parse_limit(f"{limit}", 4, 8)


def command(*words: str) -> Result:
    return CliRunner().invoke(app, ["plan", "--half-pipeline", "-m", "8", *words])


def test_the_command(families: list[str]) -> None:
    words = ("--pp", "4", "--gpu", "h100", "--dp", "2", "--distributed-optimizer", "--model", TEXT)
    text = command(*words).output
    assert "PP 4 x DP 2, 8 microbatches of each copy of the model; PP 2 x DP 4, 4 micro" in text
    assert "gradients" in text and "reduced in" in text
    data = json.loads(command(*words, "--json").output)
    half, whole = data["half"], data["whole"]
    assert half["division"] == {"ranks": 2, "data_parallel": 4, "microbatches": 4}
    assert half["reduction"]["gradients"] > whole["reduction"]["gradients"] > 0
    written = " ".join(half["plan"]["candidates"][0]["flags"])
    assert f"write for PP 2 x DP 4: --pipeline-model-parallel-size 2 {written}" in text
    alone = command("--pp", "4").output
    assert "reduced" not in alone and "PP 2 x DP 2 under zb-v takes" in alone


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--pp", "2"), "of 2 there is none; give an even number of them, 4 or more"),
        (("--pp", "5"), "of 5 there is none"),
        (("--pp", "4", "-m", "7"), "7 microbatches do not divide: give an even number"),
        (("--pp", "4", "--plot", "plan.svg"), "draws no picture: drop --plot"),
    ],
)
def test_where_there_is_no_half(words: tuple[str, ...], why: str, families: list[str]) -> None:
    result = command(*words)
    assert result.exit_code == 2 and why in " ".join(result.output.split())
