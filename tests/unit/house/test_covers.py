"""Tests of the marks `covers`, in which a test names the settings of Megatron that it runs."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts.evaluation.recipes import settings as of_recipes
from scripts.evaluation.recipes.public_form import read_recipes
from scripts.evaluation.recipes.recipe import RECIPES, Recipe, read_models, resolve
from tests.helpers import witnesses
from tests.helpers.combinations import nightly
from tests.helpers.covers.collecting import marks_of
from tests.helpers.covers.feature import Feature
from tests.helpers.covers.markers import Shown, collect, read_mark
from tests.helpers.covers.tested import Evidence, features_of, kind_of
from tests.helpers.covers.vocabulary import (
    GRADES,
    KINDS,
    OTHER_NAMES,
    features,
    may_wait_for_a_gpu,
)
from tests.helpers.documents import check_written, table

LINE = ("line",)


def read(grade: Any = "A", kinds: Any = LINE, /, needs_gpu: bool = False, **settings: Any) -> Any:
    return read_mark("a test", (grade, kinds), settings, needs_gpu=needs_gpu)


def test_names_that_mean_the_same_are_those_of_recipes() -> None:
    """The table of equivalent setting names is the same in the marks of tests and in the scripts
    that read recipes. Marks of tests import no scripts, so both have a copy."""
    assert of_recipes.OTHER_NAMES == OTHER_NAMES


def test_all_marks_are_understood(request: pytest.FixtureRequest) -> None:
    """Every `covers` mark can be read. This run reads the marks of its own tests, and a run of the
    whole suite reads all."""
    for item in request.session.items:
        for mark in marks_of(item):
            read_mark(mark["test"], mark["words"], mark["settings"], needs_gpu=mark["needs_gpu"])


@pytest.mark.parametrize(
    ("mark", "told"),
    [
        (lambda: read(context_parallel=2), "there is no setting 'context_parallel'"),
        (
            lambda: read(optimizer="adamw"),
            "optimizer='adamw' is not known: the value must be one of",
        ),
        (lambda: read(recompute_modules=["mla"]), "unknown values mla: write some of core_attn"),
        (lambda: read(packed=1), "the value must be True or False"),
        (lambda: read("D"), "grade 'D' is not one of A, B, C"),
        (lambda: read("A", "line"), "kinds of schedule 'line' are not"),
        (lambda: read("A", ("zb-h1",)), "kinds of schedule"),
        (lambda: read("C", LINE, packed=True), "tests that need a GPU have grade C"),
        (
            lambda: read("A", LINE, needs_gpu=True, packed=True),
            "tests that need a GPU have grade C",
        ),
        (
            lambda: read("C", LINE, needs_gpu=True, packed=True),
            "grade C is for settings that only GPUs can show",
        ),
        (
            lambda: read("A", LINE, moe_flex_dispatcher_backend="deepep"),
            "deepep has only a stand-in",
        ),
        (lambda: read_mark("a test", ("A",), {}, needs_gpu=False), "requires a grade and kinds"),
    ],
)
def test_what_is_not_understood_is_an_error(mark: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        mark()


def test_values_stand_for_others() -> None:
    """In a `covers` mark some values stand for others: two ranks for any larger number, one name of
    a setting for its other name, and a list for each of its words."""
    two = features({"context_parallel_size": 2})
    assert two == features({"context_parallel_size": 32}) and len(two) == 1
    assert features({"sft": True}) == features({"enable_offline_packing": True})
    assert features({"recompute_modules": ["mlp", "moe_act"]}) == {
        Feature("recompute_modules", "mlp"),
        Feature("recompute_modules", "moe_act"),
    }
    assert features({"exp_avg_dtype": "torch.bfloat16"}) == features({"exp_avg_dtype": "bf16"})


def test_what_is_off_or_a_size_is_no_feature() -> None:
    assert not features(
        {
            "context_parallel_size": 1,
            "hidden_size": 4096,
            "optimizer": "adam",
            "packed": False,
            "mtp_num_layers": None,
            "cuda_graph_impl": "none",
            "precision": "fp32",
            "grad_reduce_in_fp32": True,
        }
    )


@pytest.mark.parametrize(
    ("layout", "text"),
    [("Ett|tt|tt|ttmL", ""), ("Ett||tt|L", "with empty stages"), ("E|tt|tL", "with empty stages")],
)
def test_layouts_with_stages_without_layers_are_others(layout: str, text: str) -> None:
    assert features({"pipeline_model_parallel_layout": layout}) == {
        Feature("pipeline_model_parallel_layout", text)
    }


@pytest.mark.parametrize(
    ("layers", "are_mixed"),
    [
        (1, False),
        (2, True),
        ([1, 1], False),
        ([0, 1], True),
        ("([0]*3+[1]*58)", True),
        ("([1]*40)", False),
    ],
)
def test_dense_layers_among_experts(layers: Any, are_mixed: bool) -> None:
    assert bool(features({"moe_layer_freq": layers})) == are_mixed


def test_only_kernels_wait_for_a_gpu() -> None:
    shown = read("C", LINE, needs_gpu=True, precision="fp8_cs", packed=True)
    assert shown.features == {Feature("precision", "fp8_cs")}
    (bf16,) = features({"precision": "bf16"})
    assert not may_wait_for_a_gpu(bf16)


def test_a_mark_does_not_hold_where_nothing_was_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `covers` mark fails if its setting has a witness (a function that only this setting calls)
    and no training of the test was watched for it. Such a test used to keep its marks, whatever
    code had run."""
    # the setting "packed" has no witness
    reduced, packed = Feature("overlap_grad_reduce"), Feature("packed")
    monkeypatch.setattr(witnesses, "_seen", None)
    here, callers = (
        "tests/pipeline/training/test_parity.py::test_x",
        "tests/pipeline/callers/test_callers.py::test_x",
    )
    assert witnesses.unseen([reduced, packed], here) == [reduced]
    assert witnesses.unseen([reduced, packed], callers) == []
    witnesses.note([])
    assert witnesses.unseen([reduced, packed], callers) == [reduced]
    witnesses.note([reduced])
    assert witnesses.unseen([reduced, packed], here) == []


def test_the_tests_that_nothing_watches_exist() -> None:
    root = Path(__file__).resolve().parents[3]
    for test, reason in witnesses.UNWATCHED.items():
        file, _, function = test.partition("::")
        assert reason and (root / file).exists(), test
        assert not function or f"def {function}" in (root / file).read_text(), test


# ---- settings of public recipes that tests cover

ALL = read_recipes(RECIPES)
MODELS = read_models()
LLAMA = "recipes.llama.h100.llama3:llama3_70b_pretrain_32gpu_h100_bf16_16k_config"


@functools.cache
def resolved() -> tuple[Recipe, ...]:
    return tuple(resolve(name, raw, MODELS) for name, raw in ALL.items())


@functools.cache
def everything() -> tuple[Shown, ...]:
    """Return made-up tests: one for each feature of a recipe, and one that has all features."""
    found = {feature for recipe in resolved() for feature in features_of(recipe)}
    one_by_one = [Shown(str(feature), "B", KINDS, frozenset({feature})) for feature in found]
    return (*one_by_one, Shown("all", "B", KINDS, frozenset(found)))


def grades_of(tests: Sequence[Shown], recipes: Sequence[Recipe], kind: str = "") -> Counter[str]:
    """Return how many of ``recipes`` the ``tests`` cover, by grade. Evidence counts under this
    ``kind`` of schedule or, without it, under the kind that has each recipe's own stages."""
    evidence = Evidence(tests)
    of_recipes = (evidence.of(kind or kind_of(one), features_of(one)) for one in recipes)
    return Counter(found.grade for found in of_recipes if found.grade is not None)


def test_a_mark_that_is_removed_lowers_the_figure() -> None:
    evidence = everything()[:-1]
    together = Shown(
        "together",
        "B",
        KINDS,
        frozenset(
            Feature(name, text)
            for name, text in (
                ("mtp_num_layers", ">= 1"),
                ("context_parallel_size", ">= 2"),
                ("packed", ""),
            )
        ),
    )
    assert grades_of([*evidence, together], resolved()) == {"B": len(ALL)}
    low = Feature("precision", "nvfp4")
    recipes = sum(low in features_of(recipe) for recipe in resolved())
    without = [shown for shown in evidence if shown.features != {low}]
    assert grades_of([*without, together], resolved()) == {"B": len(ALL) - recipes}
    assert recipes > 20
    # Features that must be tested together are not covered by separate tests.
    assert grades_of(evidence, resolved()).total() < len(ALL)


def test_a_recipe_has_the_grade_of_its_worst_feature() -> None:
    recipe = resolve(LLAMA, ALL[LLAMA], MODELS)
    worst, *others = sorted(features_of(recipe))
    shown = [Shown("others", "A", KINDS, frozenset(others))]
    for grade in ("C", "B", "A"):
        shown.append(Shown("worst", grade, KINDS, frozenset({worst})))
        assert grades_of(shown, [recipe]) == {grade: 1}
    elsewhere = Evidence([shown[0], Shown("worst", "A", ("v",), frozenset({worst}))])
    assert elsewhere.of(kind_of(recipe), features_of(recipe)).missing == ((worst,),)
    assert elsewhere.of("v", features_of(recipe)).missing == ()


def test_settings_that_only_megatron_has_are_not_shown() -> None:
    raw = {**ALL[LLAMA], "model.qk_clip": True}
    recipe = resolve(LLAMA, raw, MODELS, {"qk_clip": False})
    missing = Evidence(everything()).of(kind_of(recipe), features_of(recipe)).missing
    assert (Feature("qk_clip"),) in missing


@nightly("marks are understood, and counted, in the tests above")
def test_the_page_has_what_tests_show_of_recipes() -> None:
    shown = collect()
    rows = []
    for name, kind in (("own stages", ""), ("v-auto", "v")):
        grades = grades_of(shown, resolved(), kind)
        cells = [name, len(ALL), grades.total(), *(grades[grade] for grade in GRADES)]
        rows.append(list(map(str, cells)))
    check_written("shown", table(["", "recipes", "shown", *GRADES], rows), "recipes.md")
