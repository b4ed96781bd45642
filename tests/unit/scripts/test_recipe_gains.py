"""Tests of the gains of public recipes by other layouts and schedules."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.cost_model.gpus import RESERVED_SHARE, USABLE
from megatron_ext.cost_model.model_memory import TrainingState
from megatron_ext.cost_model.short_form import parse_model
from megatron_ext.planner.layouts.recompute import LayerRecompute
from scripts.evaluation.recipes import gains
from scripts.evaluation.recipes.counting import Row
from scripts.evaluation.recipes.gains import MARGIN, Configuration, Gains, Option, gains_of
from scripts.evaluation.recipes.gains_page import gains_section, gains_table
from scripts.evaluation.recipes.prospects import Prospect, prospects_of
from scripts.evaluation.recipes.public_form import read_recipes
from scripts.evaluation.recipes.recipe import RECIPES, Recipe, read_models, resolve
from scripts.evaluation.recipes.verdict import Verdict

ALL = read_recipes(RECIPES)
MODELS = read_models()
LLAMA = "perf_recipes.llama.h100.llama3:llama3_70b_pretrain_64gpu_h100_fp8cs_config"
GPT = parse_model("layers=8,hidden=1024,heads=8,sequence=2048,vocabulary=131072")
CONFIGURATION = Configuration(
    GPT.model, GPT.execution(), TrainingState(), "h100", 2, 4, "1f1b", (4, 4)
)


def recipe(name: str = LLAMA, **more: Any) -> Recipe:
    return resolve(name, {**ALL[name], **more}, MODELS)


def test_gains_of_a_configuration() -> None:
    """The script computes the gains of a configuration. If the output layer is as heavy as six
    layers, Megatron's best layout moves layers away from it, and this project's schedules are no
    slower."""
    found = gains_of(CONFIGURATION)
    assert found.baseline.gain == 1 and found.baseline.layers == (4, 4)
    assert 1.1 < found.stock.gain <= found.ours.gain
    assert found.stock.seconds * found.stock.gain == pytest.approx(found.baseline.seconds)
    assert found.stock.layers[-1] < found.stock.layers[0]
    assert found.baseline.fullest < found.bound < USABLE * 78 * 2**30 / (1 + RESERVED_SHARE / 2)
    assert found.ours.recompute == ""
    full = replace(CONFIGURATION.execution, recompute=True)
    again = gains_of(replace(CONFIGURATION, execution=full, recompute=(LayerRecompute(),)))
    assert again.stock.recompute == "none" and again.stock.gain > found.stock.gain + 0.05
    frozen = gains_of(replace(CONFIGURATION, is_frozen=True))
    assert (
        frozen.baseline.fullest < found.baseline.fullest
        and frozen.baseline.seconds < found.baseline.seconds
    )


def lines(stock: float, fullest: float) -> Any:
    """Return a stand-in for a result of `compare_layouts`. ``stock`` is the gain of Megatron's
    best, ``fullest`` the memory of the fullest rank."""

    def line(seconds: float) -> Any:
        return SimpleNamespace(
            schedule="1f1b",
            method=SimpleNamespace(value="naive"),
            layout=SimpleNamespace(layers=(4, 4)),
            seconds=seconds,
            fullest=fullest,
            recompute=LayerRecompute(),
        )

    baseline, best = line(1.0), line(1 / stock)
    return SimpleNamespace(
        baseline=baseline,
        stock=best,
        ours=best,
        bound=10.0 * MARGIN,
        gain=lambda of: 1 / of.seconds - 1,
    )


@pytest.mark.parametrize(("fullest", "is_tight"), [(8.5, False), (9.5, True)])
def test_a_gain_that_needs_the_last_bytes_is_marked(
    monkeypatch: pytest.MonkeyPatch, fullest: float, is_tight: bool
) -> None:
    def compared(*arguments: Any) -> Any:
        return lines(1.0 if arguments[-1] else 1.2, fullest * MARGIN)

    monkeypatch.setattr(gains, "_compared", compared)
    assert gains_of(CONFIGURATION).stock.is_tight is is_tight


def option(gain: float, schedule: str, is_tight: bool = False) -> Option:
    return Option(schedule, "naive", (4, 4), gain, 6 / gain, 60 * 2**30, is_tight)


def test_adapters_are_recognised_by_the_name() -> None:
    """Adapters are recognised by the recipe's name.

    A recipe with Bridge's default adapters names none of their settings. The script used to plan it
    as if the whole model were trained, with 272 GiB on a GPU of 80.
    """
    name = "recipes.glm.h100.glm45:glm45_air_106b_peft_8gpu_h100_bf16_config"
    assert not any(key.startswith("peft") for key in ALL[name])
    assert recipe(name).settings["peft"] == "lora"


def prospect(ours: Option, name: str = LLAMA) -> Prospect:
    baseline = option(1.0, "1f1b")
    found = Gains(baseline, option(1.05, "interleaved:vpp=2"), ours, 74 * 2**30)
    return Prospect(recipe(name), CONFIGURATION, found)


def row(name: str, verdict: Verdict) -> Row:
    return Row(name, on_stages=verdict)


def test_the_section_of_the_page() -> None:
    refused = Verdict("zb-h1", why="no", without=("tp_comm_overlap",))
    best = replace(option(1.2, "zb-v", is_tight=True), recompute="none")
    text, rows = gains_section([prospect(best)]), [row(LLAMA, refused)]
    (line,) = csv.DictReader(io.StringIO(gains_table([prospect(best)], rows)))
    assert line["best of all"] == "zb-v, recompute: none (without tp_comm_overlap)"
    assert (line["gain of all"], line["GiB of all"]) == ("1.200*", "60.0")
    assert "| m <= 2p | 1 | 1.050 [1.05] | 1.200 [1.20] | 1 | 1 | 0 |" in text
    unknown = Prospect(recipe(), None, "the recipe's GPU is unknown: vr200")
    why = (
        "1 recipes are not planned; the most frequent reason (1): "
        "the recipe's GPU is unknown: vr200."
    )
    assert why in gains_section([prospect(best), unknown])


def test_what_is_equal_is_planned_once() -> None:
    asked: list[Configuration] = []

    def all_gains(configurations: Sequence[Configuration]) -> dict[Configuration, str]:
        asked.extend(configurations)
        return dict.fromkeys(configurations, "no plan")

    def configuration_of(recipe: Recipe) -> Configuration:
        if recipe.gpu == "vr200":
            raise ValueError("the recipe's GPU is unknown")
        return CONFIGURATION

    unknown = next(name for name in ALL if "vr200" in name)
    made = prospects_of([recipe(), recipe(unknown)], configuration_of, all_gains)
    assert asked == [CONFIGURATION]
    assert [prospect.gains for prospect in made] == ["no plan", "the recipe's GPU is unknown"]
