"""Tests that list every collective over all ranks of a job, with the reason why every pipeline
reaches it.

Pipelines that no communication connects come to different shapes and numbers of microbatches in
their steps. All ranks used to join a collective for each new program with offload, at the end of
each turn of a race, and for each shape whose costs were measured. A pipeline that came there alone
waited for ever, without a message. A search of the sources finds such collectives, which a training
of equal pipelines never shows.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Set
from pathlib import Path

import pytest

from tests.unit.house.test_device_waits import RUNNING

ROOT = Path(__file__).resolve().parents[3]

# Collectives of torch.distributed, with the number of positional arguments before the group.
GROUP_AT = {
    **{"all_reduce": 2, "broadcast": 2, "reduce": 3, "all_gather": 2, "gather": 3, "scatter": 3},
    **{"all_gather_into_tensor": 2, "reduce_scatter": 3, "reduce_scatter_tensor": 3},
    **{"all_to_all": 2, "all_to_all_single": 4, "all_reduce_coalesced": 2},
    **{"all_gather_object": 2, "broadcast_object_list": 2, "gather_object": 3},
    **{"scatter_object_list": 3, "barrier": 0, "monitored_barrier": 0},
}
# Functions that all ranks must call, whatever group they create, and functions of
# `megatron_ext/runtime/world.py`.
OF_THE_WORLD = {"new_group", "new_subgroups", "new_subgroups_by_enumeration"}
MODULES = {"dist", "torch.distributed", "distributed_c10d"}
OURS = {"told_by_rank_0", "gather_from_all"}

ONLY_HERE = "megatron_ext/runtime/world.py"

# The allowed calls (file and function) of collectives of the world, by the moment of the call.
# Every pipeline reaches each of these moments.
REACHED: dict[str, set[tuple[str, str]]] = {
    "the building of loaders, before any step": {
        ("patches/megatron/training/training/loaders.py", "_largest"),
    },
    "the first step": {
        ("megatron_ext/adapter/programs.py", "Programs._compare"),
    },
    "the first step, and the first training step": {
        ("megatron_ext/adapter/programs.py", "Programs.agree_on_costs"),
    },
    "the first training step": {
        ("megatron_ext/runtime/host/host_memory.py", "HostMemory._begin"),
        ("megatron_ext/features/race/adapter/step_race.py", "StepRace._recall"),
        ("megatron_ext/adapter/stock/compared_step.py", "_compared"),
    },
    "a training step whose number all ranks know, where they have met before or begun": {
        ("megatron_ext/features/race/adapter/step_race.py", "StepRace._meet"),
        ("megatron_ext/features/race/adapter/step_race.py", "StepRace._why_not"),
        ("megatron_ext/features/profile/adapter/step_profile.py", "StepProfile._meet"),
        ("megatron_ext/features/profile/adapter/step_profile.py", "StepProfile._use"),
    },
}


def over_the_world(source: str) -> Iterator[tuple[str, str]]:
    """Yield, for each call of a collective over all ranks, the function that contains it and the
    called name."""
    tree = ast.parse(source)
    yield from _over_the_world(tree, "", _worlds(tree))


def _over_the_world(node: ast.AST, function: str, worlds: Set[str]) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        function = f"{function}.{node.name}".lstrip(".")
    if isinstance(node, ast.Call) and (name := _collective(node, worlds)) is not None:
        yield function, name
    for child in ast.iter_child_nodes(node):
        yield from _over_the_world(child, function, worlds)


def _collective(call: ast.Call, worlds: Set[str]) -> str | None:
    """Return the name of the called function if it is over all ranks. ``worlds`` are variables that
    contain the group of all ranks."""
    match call.func:
        case ast.Name(id=name):
            return name if name in OURS | OF_THE_WORLD else None
        case ast.Attribute(value=module, attr=name) if ast.unparse(module) in MODULES:
            groups = [keyword.value for keyword in call.keywords if keyword.arg == "group"]
            if name in GROUP_AT:
                groups += call.args[GROUP_AT[name] : GROUP_AT[name] + 1]
            elif name not in OF_THE_WORLD:
                return None
            is_of_some = groups and not any(_is_the_world(group, worlds) for group in groups)
            return None if is_of_some else name
    return None


def _is_the_world(group: ast.expr, worlds: Set[str]) -> bool:
    """Return whether ``group`` means all ranks. ``worlds`` are variables that contain the group of
    all ranks."""
    text = ast.unparse(group)
    return text == "None" or "WORLD" in text or text in worlds


def _worlds(tree: ast.AST) -> frozenset[str]:
    """Return the variables and attributes that contain the group of all ranks somewhere in
    ``tree``."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets, value=value):
                pass
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                targets = [target]
            case ast.NamedExpr(target=target, value=value):
                targets = [target]
            case _:
                continue
        if any(word in ast.unparse(value) for word in ("group.WORLD", "_get_default_group")):
            names |= {ast.unparse(target) for target in targets}
    return frozenset(names)


def found() -> dict[tuple[str, str], set[str]]:
    """Return the calls over all ranks, by file and function, in our code that runs while Megatron
    trains."""
    calls: dict[tuple[str, str], set[str]] = {}
    for folder in RUNNING:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for function, name in over_the_world(path.read_text()):
                calls.setdefault((str(path.relative_to(ROOT)), function), set()).add(name)
    return calls


def test_every_pipeline_reaches_every_collective_over_the_world() -> None:
    allowed = set().union(*REACHED.values())
    calls = {where: names for where, names in found().items() if where[0] != ONLY_HERE}
    others = {where: names - OURS for where, names in calls.items() if names - OURS}
    assert not others, f"over the world, but not by {ONLY_HERE}: {others}"
    new = sorted(calls.keys() - allowed)
    assert not new, f"do all pipelines come here? say when they do, or take the store: {new}"
    gone = sorted(allowed - calls.keys())
    assert not gone, f"there is no such call any more: {gone}"


@pytest.mark.parametrize(
    "call",
    [
        "dist.barrier()",
        "dist.all_reduce(x, dist.ReduceOp.MAX)",
        "dist.all_gather_object(told, value)",
        "dist.all_gather_object(told, value, group=dist.group.WORLD)",
        "dist.broadcast_object_list(told, src=0)",
        "torch.distributed.new_group(ranks)",
        "told_by_rank_0(work)",
        "dist.barrier(group=None)",
        "dist.all_reduce(x, dist.ReduceOp.MAX, None)",
        "(everyone := dist.group.WORLD) and dist.barrier(everyone)",
    ],
)
def test_a_collective_over_the_world_is_seen(call: str) -> None:
    assert [function for function, _ in over_the_world(f"def f():\n    return [{call}]")] == ["f"]


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    world = dist.group.WORLD\n    dist.barrier(group=world)",
        "WIDE: Any = dist.distributed_c10d._get_default_group()\ndef f():\n    dist.barrier(WIDE)",
        "def f(self):\n    self._all = dist.group.WORLD\n    dist.all_reduce(x, group=self._all)",
    ],
)
def test_a_variable_that_is_the_world_is_seen(source: str) -> None:
    assert [function for function, _ in over_the_world(source)] == ["f"]


@pytest.mark.parametrize(
    "call",
    [
        "dist.all_reduce(x, group=pipeline)",
        "dist.all_reduce(x, dist.ReduceOp.MAX, pipeline)",
        "dist.all_gather_object(told, value, group=pipeline)",
        "logits.gather(-1, rows)",
        "gather(pipeline, value)",
    ],
)
def test_others_are_not(call: str) -> None:
    assert not list(over_the_world(call))
