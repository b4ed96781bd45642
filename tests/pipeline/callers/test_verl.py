"""Tests of verl's own PPO steps under our schedules, compared with Megatron's own schedule to the
last bit.

Compared are losses, log-probabilities by microbatch, and weights.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.caller_packages import prepare
from tests.helpers.combinations import nightly
from tests.helpers.ranks import ROOT

pytestmark = nightly("by day callers with batches like verl's: test_dynamic_batches.py")

# verl builds models with one of these packages.
BRIDGES = ("mbridge", "megatron-bridge")
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "head_dim": 8,
}


@dataclass(frozen=True)
class Training:
    """Results of a training by schedule, and the text that its ranks printed."""

    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    printed: str = ""


@pytest.fixture(scope="module")
def packages() -> str:
    """Return the folder with verl. Skips the test if verl cannot be installed."""
    folder, problem = prepare("verl")
    if problem:
        pytest.skip(f"verl cannot be installed with pip: {problem}")
    return str(folder)


def train(
    packages: str,
    folder: Path,
    bridge: str,
    *trainings: str,
    ranks: int = 2,
    overrides: Sequence[str] = (),
    answers: int = 0,
    **model: Any,
) -> Training:
    path = [
        packages,
        str(ROOT),
        str(ROOT / "examples"),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    # The variable that selects the night's tests is no setting of a training, so megatron_ext.auto
    # would refuse it.
    environment = {
        name: value for name, value in os.environ.items() if name != "MEGATRON_EXT_NIGHTLY"
    }
    ran = subprocess.run(
        [sys.executable, "-m", "tests.helpers.verl_on_cpu", str(folder), bridge, *trainings],
        cwd=ROOT,
        env={
            **environment,
            "PYTHONPATH": os.pathsep.join(path),
            "OMP_NUM_THREADS": "1",
            "VERL_MODEL": json.dumps(model),
            "VERL_RANKS": str(ranks),
            "VERL_OVERRIDES": " ".join(overrides),
            "VERL_ANSWERS": str(answers),
        },
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    results = {name: json.loads((folder / f"{name}.json").read_text()) for name in trainings}
    return Training(results, ran.stdout)


def assert_as_stock(training: Training) -> None:
    stock = training.results["stock"]
    counts = {len(microbatches) for microbatches in stock["microbatches"]}
    assert len(counts) > 2, (
        f"verl's batches have {counts} microbatches: their numbers are to differ"
    )
    changed = [name for name, digest in stock["after"].items() if digest != stock["before"][name]]
    assert len(changed) == len(stock["after"]), "it does not learn"
    for schedule, result in training.results.items():
        for name, value in result.items():
            assert value == stock[name], f"{name} under {schedule}"
        if schedule != "stock":
            assert training.printed.count(f"megatron_ext: schedule {schedule} is installed") == 1
            assert f"megatron_ext: {schedule} on 2 ranks" in training.printed


def test_verl_trains_to_its_own_numbers_under_a_v(packages: str, tmp_path: Path) -> None:
    """verl under a V gets the numbers that it has under Megatron's schedule. Each batch has equally
    many microbatches under both schedules, and their number may be odd."""
    assert_as_stock(train(packages, tmp_path, "mbridge", "stock", "zb-v"))


@pytest.mark.parametrize("bridge", BRIDGES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_verl_trains_to_its_own_numbers(
    bridge: str, tied: bool, packages: str, tmp_path: Path
) -> None:
    schedules: tuple[str, ...] = ("stock", "zb-h1", "zb-v", "v-auto")
    if tied and bridge == "megatron-bridge":
        # Models of megatron-bridge start with unequal copies of a tied embedding, which a V refuses
        # in one line.
        schedules = ("stock", "zb-h1")
    assert_as_stock(train(packages, tmp_path, bridge, *schedules, tie_word_embeddings=tied))


def sizes(**values: int) -> list[str]:
    """Return verl's options that set parallel sizes of the actor and of the reference model."""
    return [
        f"actor_rollout_ref.{role}.megatron.{name}_model_parallel_size={value}"
        for role in ("actor", "ref")
        for name, value in values.items()
    ]


@pytest.mark.parametrize(
    ("bridge", "overrides", "model"),
    [
        pytest.param("mbridge", [], {}, id="two replicas"),
        pytest.param("mbridge", sizes(tensor=2), {}, id="tensor parallel"),
        pytest.param("megatron-bridge", sizes(expert=2), EXPERTS, id="experts"),
    ],
)
def test_verl_trains_to_its_own_numbers_on_four_ranks(
    bridge: str, overrides: list[str], model: dict[str, Any], packages: str, tmp_path: Path
) -> None:
    """verl on four ranks gets the numbers that it has under Megatron's schedule. With two replicas,
    these get different parts of a batch, in different numbers of microbatches."""
    trainings = "stock", "zb-h1", "zb-v"
    assert_as_stock(
        train(packages, tmp_path, bridge, *trainings, ranks=4, overrides=overrides, **model)
    )


def test_verls_checkpoints_go_both_ways(packages: str, tmp_path: Path) -> None:
    """A checkpoint of verl's first step can be resumed under the other schedule: the second step
    equals that of an uninterrupted training. Optimizer states are saved in Megatron's fully
    reshardable format, because its other formats do not fit a V."""
    option = "actor_rollout_ref.actor.megatron.dist_ckpt_optim_fully_reshardable=true"
    trainings = "stock:saved", "zb-v:saved", "zb-v:stock", "stock:zb-v"
    made = train(packages, tmp_path, "mbridge", *trainings, ranks=4, overrides=[option]).results
    whole = made["stock:saved"]
    assert made["zb-v:saved"] == whole
    for name in ("zb-v:stock", "stock:zb-v"):
        resumed = made[name]
        assert resumed["after"] == whole["after"] != resumed["before"], name
        for part in ("log_probs", "metrics"):
            assert resumed[part] == whole[part][1:], f"{part} of {name}"


def test_verl_trains_with_prompts_that_are_computed_once(packages: str, tmp_path: Path) -> None:
    """verl trains with prompts that are computed once for all their answers, set up as in
    examples/verl_shared_prompts.py. Each microbatch of verl's contains all answers of its prompts.
    In float32 the numbers are those of separate sequences up to the order of sums."""
    trainings = "stock", "stock:shared", "zb-h1:shared", "zb-v:shared"
    # a group is four answers to a prompt
    long = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=64"
    overrides = [long, "actor_rollout_ref.actor.use_prefix_grouper=true"]
    made = train(packages, tmp_path, "mbridge", *trainings, overrides=overrides, answers=4)
    assert made.printed.count("megatron_ext: prompts are computed once") == 3
    results = made.results
    assert {len(microbatches) for microbatches in results["stock"]["microbatches"]} != {1}
    numbers = {name: torch.load(tmp_path / f"{name}.pt") for name in trainings}
    for name in trainings[1:]:
        for ours, stocks in zip(numbers[name], numbers["stock"], strict=True):
            torch.testing.assert_close(ours, stocks, rtol=1e-5, atol=1e-5)
    assert not torch.equal(numbers["stock"][0], numbers["stock"][3])
