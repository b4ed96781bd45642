"""Runs Megatron's own unit tests of its pipeline schedules with our schedules in place of
Megatron's.

Megatron's test file runs on eight ranks as it is, except for what `OursInPlace` changes: one test
asserts which function it gets, another calls stock's function by name, and a step of seven
microbatches on four ranks, for which a test expects an error, runs under our schedules. Two tests
create process groups in each pipeline separately, under one name; gloo, unlike NCCL, would connect
these groups to one another.
"""

from __future__ import annotations

import ast
import inspect
import os
import sys
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import megatron_ext
from megatron_ext.adapter.step.pipeline_step import PipelineStep
from megatron_ext.patches import cpu
from megatron_ext.patches.engine import apply
from tests.helpers.combinations import IS_NIGHT
from tests.helpers.fetched import megatron_sources
from tests.helpers.ranks import run_ranks, values

RANKS = 8
FILE = "tests/unit_tests/pipeline_parallel/test_schedules.py"
UTILITIES = "tests/unit_tests/test_utilities.py"

LINES = ("1f1b", "zb-h1")
CHUNKS = ("interleaved", "interleaved-zb", "zb-v", "hanayo:waves=1")

# Each entry is a test of Megatron's, the schedules of ours that run in it, and how often each
# change is made in its source.
CASES: tuple[tuple[str, tuple[str, ...], dict[str, int]], ...] = (
    ("test_forward_backward_func_with_pipeline_parallel", LINES, {"identity": 1}),
    ("test_forward_backward_func_with_interleaving", CHUNKS, {"identity": 1, "7 microbatches": 1}),
    (
        "test_forward_backward_func_with_uneven_interleaving",
        CHUNKS,
        {"identity": 1, "one iterator for two chunks": 1},
    ),
    (
        "test_forward_backward_pipelining_without_interleaving_with_custom_pgs",
        LINES,
        {"stock by its name": 2, "groups of a pipeline": 1},
    ),
    (
        "test_forward_backward_pipelining_with_interleaving_with_custom_pgs",
        CHUNKS,
        {"identity": 1, "groups of a pipeline": 1},
    ),
)

# By day a linear placement and a V run; at night all cases.
BY_DAY = ((CASES[0][0], "zb-h1"), (CASES[1][0], "zb-v"))


class OursInPlace(ast.NodeTransformer):
    """Rewrites the source of a test of Megatron's; ``changed`` counts the changes by kind."""

    def __init__(self) -> None:
        self.changed: Counter[str] = Counter()

    def visit_Assert(self, node: ast.Assert) -> ast.Assert | None:
        told = "schedule.get_forward_backward_func() == schedule.forward_backward_pipelining_"
        if not ast.unparse(node.test).startswith(told):
            return node
        self.changed["identity"] += 1
        return None

    def visit_With(self, node: ast.With) -> Any:
        (item,) = node.items
        if ast.unparse(item) != "pytest.raises(RuntimeError)":
            return node
        # Our schedules raise a ValueError before the step, in place of Megatron's RuntimeError.
        if "data_iterator=[range(0, 100)]," in ast.unparse(node):
            self.changed["one iterator for two chunks"] += 1
            item.context_expr = ast.parse("pytest.raises(ValueError)", mode="eval").body
            return node
        self.changed["7 microbatches"] += 1
        return node.body

    def visit_Call(self, node: ast.Call) -> ast.Call:
        stock = "schedule.forward_backward_pipelining_without_interleaving"
        if ast.unparse(node.func) == stock:
            self.changed["stock by its name"] += 1
            node.func = ast.parse("schedule.get_forward_backward_func()", mode="eval").body
        if ast.unparse(node.func) == "_populate_embedding_and_position_groups":
            self.changed["groups of a pipeline"] += 1
            node.func = ast.Name(embedding_groups.__name__, ast.Load())
        return node


def embedding_groups(pipeline: dist.ProcessGroup) -> tuple[Any, Any]:
    """Return the process groups of the position embedding and of the embedding. All ranks of the
    world must call it."""
    ranks = dist.get_process_group_ranks(pipeline)
    pipelines: list[Any] = [None] * RANKS
    dist.all_gather_object(pipelines, ranks)
    made = {
        first: (dist.new_group([first]), dist.new_group([first, last]))
        for first, last in sorted({(ranks[0], ranks[-1]) for ranks in pipelines})
    }
    return made[ranks[0]]


class Mocker:
    """Stand-in for the fixture of pytest-mock, with as much as Megatron's tests use."""

    def __init__(self) -> None:
        self._stack: list[Any] = []

    def patch(self, target: str, **settings: Any) -> None:
        self._stack.append(mock.patch(target, **settings))
        self._stack[-1].start()

    def stop(self) -> None:
        for patch in self._stack:
            patch.stop()


def load(name: str, source: str, **more: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(more)
    sys.modules[name] = module
    exec(compile(source, name, "exec"), vars(module))
    return module


def theirs(test: str, file: Path, utilities: Path) -> tuple[Callable[..., None], Counter[str]]:
    """Return Megatron's test function ``test``, and the counts of the changes made in it."""
    sys.modules["pytest_mock"] = mock.MagicMock()
    sys.modules["tests.unit_tests"] = types.ModuleType("tests.unit_tests")
    load("tests.unit_tests.test_utilities", utilities.read_text())
    tree = ast.parse(file.read_text())
    names = [getattr(node, "name", "") for node in tree.body]
    function = tree.body[names.index(test)]
    assert isinstance(function, ast.FunctionDef)
    # drop marks, which belong to the configuration of Megatron's pytest
    function.decorator_list = []
    change = OursInPlace()
    change.visit(function)
    kept = zip(names, tree.body, strict=True)
    tree.body = [node for name, node in kept if name == test or not name.startswith("test_")]
    source = ast.unparse(ast.fix_missing_locations(tree))
    module = load("test_schedules", source, embedding_groups=embedding_groups)
    return getattr(module, test), change.changed


@pytest.mark.parametrize(
    ("test", "schedule", "changes"),
    [
        (test, name, changes)
        for test, names, changes in CASES
        for name in names
        if IS_NIGHT or (test, name) in BY_DAY
    ],
)
def test_megatrons_own(test: str, schedule: str, changes: dict[str, int]) -> None:
    file, utilities = (megatron_sources() / path for path in (FILE, UTILITIES))

    def on_rank(rank: int) -> tuple[dict[str, int], int]:
        os.environ |= {"LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
        run, changed = theirs(test, file, utilities)
        assert list(inspect.signature(run).parameters) == ["mocker"]
        steps = mock.Mock(wraps=PipelineStep.__call__)
        ours = mock.patch.object(PipelineStep, "__call__", lambda *a, **named: steps(*a, **named))
        mocker = Mocker()
        with (
            apply(cpu.patches()),
            megatron_ext.install(schedule=schedule),
            ours,
        ):
            run(mocker)
        mocker.stop()
        return dict(changed), steps.call_count

    for changed, steps in values(run_ranks(RANKS, on_rank)):
        assert changed == changes
        assert steps  # the number of steps that our schedules ran
