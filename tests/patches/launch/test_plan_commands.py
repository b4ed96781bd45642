"""Tests that `doctor` accepts the whole command that `plan` prints, if it accepts the given
command.

`plan` used to print only the flags to add: without `-m megatron_ext`, which these flags require,
and without removing Megatron's flags that conflict with them.
"""

from __future__ import annotations

import functools
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from megatron_ext.cli import app
from megatron_ext.commands import plan as plan_command
from megatron_ext.config import PipelineConfig
from megatron_ext.cost_model.gpus import GPUS
from megatron_ext.launch.command import megatron_arguments
from megatron_ext.launch.command.launch_words import Launch, read_launch
from megatron_ext.launch.command.log.unparse import unparse
from megatron_ext.launch.doctor import check as launch_check
from megatron_ext.launch.doctor.check import check_launch
from megatron_ext.launch.planner import parsed_launch
from megatron_ext.launch.planner.alternatives import (
    layouts,
    pairs,
)
from megatron_ext.launch.planner.command_line import command_with
from megatron_ext.launch.planner.launch_job import refusal_of
from megatron_ext.launch.planner.parsed_launch import LaunchRequest, with_launch
from megatron_ext.planner import confirmation, long_sequences, verdict
from megatron_ext.planner.candidate import Plan, VocabMethod
from megatron_ext.planner.layouts import candidates, comparison, descent
from megatron_ext.planner.planning_time import planning
from megatron_ext.planner.verdict import Written
from scripts.evaluation.recipes.accepting import argument_values, as_on_gpus, others
from scripts.evaluation.recipes.public_form import read_recipes
from scripts.evaluation.recipes.recipe import RECIPES, Recipe, read_models, resolve
from tests.helpers.combinations import IS_NIGHT
from tests.helpers.few_families import only_families
from tests.helpers.megatron_runs import SCRIPT, model_flags
from tests.patches.launch.test_layouts import FLAGS, LAUNCHES, ROUTED

PAIRS: dict[str, Any] = {
    **ROUTED,
    "moe_token_dispatcher_type": "alltoall",
    "num_virtual_stages_per_pipeline_rank": 2,
    "overlap_moe_expert_parallel_comm": True,
}
# Flags that a launch command needs and that no recipe contains.
OF_A_LAUNCH = (
    *("--train-iters", "1000", "--lr", "1e-4", "--eval-interval", "1000", "--eval-iters", "0"),
    *("--mock-data", "--tokenizer-type", "NullTokenizer"),
)
SECONDS = 4.0  # CPU seconds that a plan may take in these tests
# groups of microbatches in a recipe's step in these tests, each of one microbatch for each rank
GROUPS = 2
SLICED = ("1f1b", "zb-h1", "zb-v")  # schedules that are compared with slices of a sequence
APART = 17  # distance in the list between two recipes that are planned one after the other
# By recipe: whether Megatron or doctor refuses its own command, or plan has no estimate of it.
REFUSED = {
    name: who
    for who, name in map(
        str.split, (Path(__file__).parent / "refused_recipes.txt").read_text().splitlines()[1:]
    )
}
DAILY = "llama3_8b_pretrain_16gpu_h100_bf16_16k"
JOBS: dict[str, dict[str, Any]] = {
    **LAUNCHES,
    "experts": ROUTED,
    "pairs": PAIRS,
    "tensor parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "ours": {"pipeline_schedule": "zb-h1", "pipeline_memory_limit": "1x"},
    "divided": {"pipeline_schedule": "1f1b", "pipeline_vocab_parallel": "1"},
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a plan compare few alternatives of each kind without a search, end after few CPU seconds,
    and write every change that gains anything."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    only_families(monkeypatch, "1f1b", "interleaved", "zb-h1", "zb-v")
    monkeypatch.setattr(pairs, "_specs", lambda *, with_pairs: iter(["interleaved", "zb-v"]))
    monkeypatch.setattr(parsed_launch, "_METHODS", frozenset([VocabMethod.NAIVE, VocabMethod.ONE]))
    lay_out = layouts.lay_out
    monkeypatch.setattr(
        layouts, "lay_out", lambda *given, **more: lay_out(*given, **more, search=False)
    )
    with_chunks = comparison._with_chunks
    monkeypatch.setattr(comparison, "_with_chunks", lambda *given: with_chunks(*given)[:1])
    monkeypatch.setattr(candidates, "_PLACEMENTS", 1)
    monkeypatch.setattr(descent, "_STEPS", 2)
    monkeypatch.setattr(long_sequences, "COUNTS", (2,))
    make_plan = long_sequences.make_plan
    monkeypatch.setattr(
        long_sequences,
        "make_plan",
        lambda variant_of, room, specs: make_plan(variant_of, room, specs=SLICED),
    )
    monkeypatch.setattr(plan_command, "planning", functools.partial(planning, SECONDS))
    # Doctor's remark on slices would take another comparison of schedules.
    monkeypatch.setattr(launch_check, "_say_what_slices_give", lambda *given: None)
    monkeypatch.setattr(verdict, "WORTH", 0.0)
    assert confirmation.verdict_of is verdict.verdict_of


@pytest.mark.parametrize("name", JOBS)
def test_doctor_accepts_what_plan_prints(name: str) -> None:
    words = model_flags(**(FLAGS | JOBS[name]))
    installs = ["-m", "megatron_ext"] if any("--pipeline-s" in word for word in words) else []
    command = ["torchrun", "--nproc-per-node", "4", *installs, str(SCRIPT), *words]
    given = check_launch(read_launch(command), None, None)
    assert given.is_right, given.findings
    _check_what_plan_prints(_plan(command, "h100"))


SHARED: dict[str, Any] = {
    **{name: value for name, value in PAIRS.items() if not name.startswith("overlap_moe")},
    "moe_shared_expert_intermediate_size": 1024,
    "moe_shared_expert_overlap": True,
}
IN_PAIRS = "--overlap-moe-expert-parallel-comm"


@pytest.mark.parametrize(
    ("flags", "written", "why"),
    [
        (SHARED, Written((IN_PAIRS,)), "disable moe_shared_expert_overlap"),
        (SHARED, Written((IN_PAIRS,), ("--moe-shared-expert-overlap",)), None),
        (
            {"fp8_format": "hybrid", "transformer_impl": "transformer_engine"},
            Written(("--pipeline-schedule", "zb-v", "--pipeline-activation-offload", "full")),
            "quantised",
        ),
    ],
)
def test_what_megatron_or_we_would_refuse_is_not_recommended(
    flags: dict[str, Any], written: Written, why: str | None
) -> None:
    """`plan` recommends no flags that Megatron or we would refuse for this launch. For public
    recipes it used to print commands that end at their start."""
    words = tuple(model_flags(**(FLAGS | flags)))
    request = LaunchRequest(Launch(str(SCRIPT), False, words, world_size=4))
    told = with_launch(request, lambda parsed: refusal_of(request, parsed, written))
    assert told is None if why is None else told is not None and why in told


@pytest.mark.parametrize(
    ("values", "written", "why"),
    [
        ({}, Written(("--pipeline-schedule", "zb-v")), None),
        (
            {"num_virtual_stages_per_pipeline_rank": 2},
            Written(("--pipeline-schedule", "zb-h1"), ("--num-virtual-stages-per-pipeline-rank",)),
            None,
        ),
        (
            {"num_virtual_stages_per_pipeline_rank": 2},
            Written(("--pipeline-schedule", "zb-h1")),
            "puts 1 stage on each rank",
        ),
        ({}, Written(("--tensor-model-parallel-size", "3")), "not divisible"),
        ({"use_ring_exchange_p2p": True}, Written(("--pipeline-schedule", "zb-v")), "drop --use-r"),
    ],
)
def test_what_a_file_of_arguments_would_be_refused_with(
    values: dict[str, Any], written: Written, why: str | None
) -> None:
    """`plan` of a file of arguments checks a change by Megatron's validation and our refusals. Such
    a file has no command that could be checked, so its changes used to be recommended unchecked."""
    launched = {"micro_batch_size": 1, "global_batch_size": 8, "train_iters": 5, "lr": 0.01}
    request = LaunchRequest(values={**FLAGS, **launched, **values}, world_size=4)
    told = with_launch(request, lambda parsed: refusal_of(request, parsed, written))
    assert told is None if why is None else told is not None and why in told, told


def test_overlapped_passes_drop_what_megatron_refuses_with_them() -> None:
    words = tuple(model_flags(**(FLAGS | SHARED)))
    request = LaunchRequest(Launch(str(SCRIPT), False, words, world_size=4), gpu=GPUS["h100"])
    changed = with_launch(request, lambda parsed: pairs.other_pairs(parsed.variants, NO_PLAN, None))
    assert changed is not None and changed.dropped == ("--moe-shared-expert-overlap",)
    assert changed.candidates


NO_PLAN = Plan((), {})


def _recipes() -> list[str]:
    """Return the public recipes whose GPU is known: all at night, and by day one that is quickly
    planned.

    Neighbours of the list are far from each other in this order, so that a run that ends early has
    seen all models.
    """
    names = [name for name, recipe in _understood().items() if recipe.gpu in GPUS]
    if IS_NIGHT:
        return [name for start in range(APART) for name in names[start::APART]]
    return [next(name for name in names if DAILY in name)]


@functools.cache
def _understood() -> dict[str, Recipe]:
    models = read_models()
    with as_on_gpus():
        return {
            name: resolve(name, raw, models, others())
            for name, raw in read_recipes(RECIPES).items()
        }


def _batch_of_few(args: Any) -> int:
    """Return the global batch of ``args``, reduced to `GROUPS` groups of microbatches and the same
    remainder if it has more. Both sizes are refused for the same reasons."""
    at_once = args.micro_batch_size * args.data_parallel_size
    group = args.microbatch_group_size_per_vp_stage or args.pipeline_model_parallel_size
    count, few = args.global_batch_size // at_once, GROUPS * group
    return int(at_once * min(count, few + count % group))


@pytest.mark.parametrize("name", _recipes())
def test_doctor_accepts_what_plan_prints_for_a_recipe(name: str) -> None:
    recipe = _understood()[name]
    assert recipe.gpu is not None and recipe.gpus is not None
    try:
        with as_on_gpus():
            args = megatron_arguments.parse_values(argument_values(recipe)).args
            args = megatron_arguments.validate(args, PipelineConfig(), recipe.gpus)
    except ValueError as error:
        assert REFUSED.get(name) == "stock", error
        return
    args.global_batch_size = _batch_of_few(args)
    unparsed = unparse({key: str(value) for key, value in vars(args).items()})
    nodes, of_node = divmod(recipe.gpus, 8) if recipe.gpus % 8 == 0 else (recipe.gpus, 1)
    command = ["torchrun", "--nnodes", str(nodes), "--nproc-per-node", str(of_node or 8)]
    command += [str(SCRIPT), *unparsed.words, *OF_A_LAUNCH]
    given = check_launch(read_launch(command), None, None)
    if not given.is_right:
        wrong = [finding.text for finding in given.findings if finding.verdict == "wrong"]
        assert REFUSED.get(name) == "doctor", wrong
        return
    result = _plan(command, recipe.gpu)
    if "no estimate: how long sparse attention" in result.output:
        assert REFUSED.get(name) == "plan", result.output
        return
    assert name not in REFUSED, "is no longer refused: take it out of the list"
    _check_what_plan_prints(result)


def _plan(command: list[str], gpu: str) -> Result:
    words = ["plan", "--gpu", gpu, "--", *command]
    return CliRunner().invoke(app, words, catch_exceptions=False)


def _check_what_plan_prints(result: Result) -> None:
    if "no schedule fits" in result.stderr:
        return
    assert result.exit_code == 0, result.output
    text = result.stdout.splitlines()
    assert any(row.startswith("verdict:") for row in text[:4])
    printed = [row for row in text if row.startswith("torchrun ")]
    if not printed:
        assert "keep it" in result.stdout
        return
    launch = read_launch(shlex.split(printed[0]))
    found = check_launch(launch, None, None)
    assert found.is_right, (printed, [f for f in found.findings if f.verdict == "wrong"])
    ours = [word for word in launch.arguments if word.startswith("--pipeline-schedule")]
    assert bool(ours) <= bool(launch.installs) and len(ours) <= 1
    (change,) = (row for row in text if row.startswith("verdict:"))
    if ours:
        (spec,) = re.findall(r"--pipeline-schedule ([^\s,]+)", change)
        assert found.prediction is not None
        assert spec.partition(":")[0] == found.prediction.schedule.partition(":")[0]


ADDED = Written(("--pipeline-schedule", "zb-v"), ("--num-virtual-stages-per-pipeline-rank",))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("torchrun --nnodes 2 train.py A", "torchrun --nnodes 2 -m megatron_ext train.py A"),
        ("python -u train.py A", "python -u -m megatron_ext train.py A"),
        ("python -m pkg.train A", "python -m megatron_ext -m pkg.train A"),
        ("X=1 srun python train.py A", "X=1 srun python -m megatron_ext train.py A"),
        ("train.py A", "-m megatron_ext train.py A"),
        ("python -m megatron_ext train.py A", "python -m megatron_ext train.py A"),
        ("srun bash -c 'python train.py A'", "srun bash -c 'python -m megatron_ext train.py A"),
    ],
)
def test_a_command_is_written_anew(before: str, after: str) -> None:
    given = "--bf16 --num-virtual-stages-per-pipeline-rank 4 --pipeline-schedule 1f1b --lr 1"
    left = "--bf16 --lr 1 --pipeline-schedule zb-v"
    words = shlex.split(before.replace(" A", f" {given}"))
    written = command_with(read_launch(words), ADDED)
    expected = after.replace(" A", f" {left}") + "'" * ("-c '" in after)
    assert written == expected
    layout = ("--pipeline-model-parallel-layout", "Et|tL")  # a flag of Megatron's only
    stock = command_with(read_launch(words), Written(layout, ADDED.dropped))
    assert "zb-v" not in stock and "--pipeline-schedule" not in stock
    assert ("megatron_ext" in stock) is ("megatron_ext" in before)


def test_a_script_that_brings_us_along_is_left_as_it_is(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import megatron_ext.auto\n")
    written = command_with(read_launch(["python", str(script), "--bf16"]), ADDED)
    assert written == f"python {script} --bf16 --pipeline-schedule zb-v"
