"""The marks by which tests say what they show, and the words of which they are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.recipes.collecting import marks_of
from scripts.recipes.feature import Feature
from scripts.recipes.markers import read_mark
from scripts.recipes.vocabulary import features, may_wait_for_a_gpu
from tests.helpers import witnesses

LINE = ("line",)


def read(grade: Any = "A", kinds: Any = LINE, /, needs_gpu: bool = False, **settings: Any) -> Any:
    return read_mark("a test", (grade, kinds), settings, needs_gpu=needs_gpu)


def test_all_marks_are_understood(request: pytest.FixtureRequest) -> None:
    """Of the tests that are run beside this one: in a run of all tests, of all."""
    for item in request.session.items:
        for mark in marks_of(item):
            read_mark(mark["test"], mark["words"], mark["settings"], needs_gpu=mark["needs_gpu"])


@pytest.mark.parametrize(
    ("mark", "told"),
    [
        (lambda: read(context_parallel=2), "there is no setting 'context_parallel'"),
        (lambda: read(optimizer="adamw"), "optimizer='adamw' is not known: it is one of"),
        (lambda: read(recompute_modules=["mla"]), "mla: there are core_attn"),
        (lambda: read(packed=1), "it is True or False"),
        (lambda: read("D"), "grade 'D' is not one of A, B, C"),
        (lambda: read("A", "line"), "kinds of schedule 'line' are not"),
        (lambda: read("A", ("zb-h1",)), "kinds of schedule"),
        (lambda: read("C", LINE, packed=True), "grade C is of tests for GPUs"),
        (lambda: read("A", LINE, needs_gpu=True, packed=True), "grade C is of tests for GPUs"),
        (lambda: read("C", LINE, needs_gpu=True, packed=True), "has to wait for a GPU"),
        (lambda: read("A", LINE, moe_flex_dispatcher_backend="deepep"), "deepep has a stand-in"),
        (lambda: read_mark("a test", ("A",), {}, needs_gpu=False), "requires a grade and kinds"),
    ],
)
def test_what_is_not_understood_is_an_error(mark: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        mark()


def test_values_stand_for_others() -> None:
    """Two ranks for more, two names for one setting, a list for each of its words."""
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
def test_dense_layers_beside_experts(layers: Any, are_mixed: bool) -> None:
    assert bool(features({"moe_layer_freq": layers})) == are_mixed


def test_only_kernels_wait_for_a_gpu() -> None:
    shown = read("C", LINE, needs_gpu=True, precision="fp8_cs", packed=True)
    assert shown.features == {Feature("precision", "fp8_cs")}
    (bf16,) = features({"precision": "bf16"})
    assert not may_wait_for_a_gpu(bf16)


def test_a_mark_does_not_hold_where_nothing_was_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test whose trainings nobody noted kept its marks, whatever had run."""
    reduced, packed = Feature("overlap_grad_reduce"), Feature("packed")  # which has no witness
    monkeypatch.setattr(witnesses, "_seen", None)
    here, callers = (
        "tests/pipeline/test_parity.py::test_x",
        "tests/pipeline/test_callers.py::test_x",
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
