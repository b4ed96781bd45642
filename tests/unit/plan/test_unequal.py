"""Tests of ``plan --lengths``: what it gains to arrange microbatches of unequal lengths, and the
flags that do it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from megatron_ext.cli import app
from megatron_ext.cost_model.execution import Execution
from megatron_ext.planner import long_sequences, planner
from megatron_ext.planner.training import Training
from megatron_ext.planner.training_job import training_job_of
from megatron_ext.planner.unequal_gains import DEAL, ORDER, PROGRAM, unequal_gains
from megatron_ext.planner.verdict import NOTHING, Written
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.microbatch_costs import BatchSize, MicrobatchLoads, read_loads

MODEL = "layers=8,hidden=1024,heads=8,sequence=8192,vocabulary=8000"


@pytest.fixture(autouse=True)
def few_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare 1f1b and zb-v only, without a search; for long sequences compare two slices only."""
    monkeypatch.setattr(planner, "all_specs", lambda: ["1f1b", "zb-v"])
    monkeypatch.setattr(long_sequences, "COUNTS", (2,))
    monkeypatch.setattr(long_sequences, "_of_other_settings", lambda *given: ())


def lengths(folder: Path, steps: int, per_step: int, tokens: int = 8192) -> Path:
    """Write a file of microbatches that have one long document and many short ones, and return its
    path."""
    rng, lines = np.random.default_rng(3), []
    for _ in range(steps * per_step):
        whole = int(rng.integers(tokens // 8, tokens))
        lines.append(" ".join(map(str, [whole, *[64] * ((tokens - whole) // 64)])))
    file = folder / "lengths.txt"
    file.write_text("\n".join(lines) + "\n")
    return file


def planned(*words: str, sizes: str = "pp=4,m=8") -> str:
    result = CliRunner().invoke(app, ["plan", sizes, *words])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_model_has_the_gain_of_each_part(tmp_path: Path) -> None:
    file = str(lengths(tmp_path, 4, 32))
    plan = partial(planned, "--gpu", "h100", sizes=f"{MODEL},pp=4,m=8,dp=4")
    told = json.loads(plan("--lengths", file, "--json"))
    gains = told["unequal"]
    # The plan splits the vocabulary, so unequal microbatches get no program of their own.
    assert 0 < gains["order"] < gains["deal"] and gains["program"] is None
    assert (gains["steps"], gains["microbatches"], gains["replicas"]) == (4, 8, 4)
    assert gains["seconds"] < told["verdict"]["taken"]["seconds"]
    text = plan("--lengths", file)
    assert f"\narrange:   {' '.join((*ORDER, *DEAL))}" in text and "a step in order of" in text
    assert "arrange" not in plan()


def test_equal_microbatches_gain_nothing(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("8192\n" * 8)
    told = planned("--costs", "f=10,i=12,w=8,comm=1", "--lengths", str(file))
    assert "order:     0.0% shorter\nprogram:   " in told and "deal" not in told
    assert "arrange:   nothing; no part saves 2% of a step\n" in told
    file.write_text("8192\n" * 7)
    few = CliRunner().invoke(app, ["plan", "pp=4,m=8", "--lengths", str(file)])
    assert few.exit_code == 2 and "has 7 microbatches" in few.output


def test_prompts_that_are_computed_once_have_a_gain(tmp_path: Path) -> None:
    """A plan for prompts with their answers says what computing each prompt once gains. A user
    used to have to compare the plans of two files."""
    file = tmp_path / "lengths.txt"
    file.write_text("100+50+50\n" * 8)
    costs = "--costs", "f=10,i=12,w=8"
    told = planned(*costs, "--lengths", str(file))
    assert "\nprompts:   computed once, 33.3% shorter than the same microbatches" in told
    file.write_text("100 50 50\n" * 8)
    assert "prompts:" not in planned(*costs, "--lengths", str(file))


def test_attention_of_prompts_that_are_computed_once(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("100+60+40 20\n30 30\n")
    made = read_loads(file, BatchSize(2, sequence=100))
    assert made.unshared is not None
    assert made.tokens.tolist() == [[2.2, 0.6]] and made.unshared.tokens.tolist() == [[3.2, 0.6]]
    shared = 100**2 + 60 * 260 + 40 * 240 + 20**2
    apart = 160**2 + 140**2 + 20**2
    assert made.squares[0, 0] == shared / 100**2 and made.unshared.squares[0, 0] == apart / 100**2
    padded = read_loads(file, BatchSize(2, sequence=300, is_padded=True))
    assert padded.unshared is None


def test_answers_that_share_no_prompt_have_no_other_loads(tmp_path: Path) -> None:
    """A prompt with one answer costs as much as one document of their joined length, whatever the
    squares are rounded to. If the last bit of the two loads differed, the prompts used to count as
    shared."""
    prompt, answer = 0.1, 0.3
    length = prompt + answer
    assert prompt * prompt + answer * (2 * prompt + answer) != length * length
    file = tmp_path / "lengths.txt"
    file.write_text(f"{prompt}+{answer}\n{length}\n")
    assert read_loads(file, BatchSize(2)).unshared is None


# --- the flags that are written


def gains(
    loads: MicrobatchLoads,
    refuses: Any = lambda words: None,
    *,
    replicas: int = 4,
    expert_replicas: int = 1,
) -> Any:
    job = training_job_of(Training(4, 8, lambda placement: uniform(placement, 10, 12, 8, 1)))
    plan = job.compare()
    taken = next(job.alternative(one) for one in plan.candidates if one.schedule == "zb-v")
    batch = BatchSize(8, replicas, expert_replicas=expert_replicas)
    return unequal_gains(loads, batch, taken, NOTHING, lambda w: refuses(w.arranging))


@pytest.fixture(scope="module")
def loads(tmp_path_factory: pytest.TempPathFactory) -> MicrobatchLoads:
    file = lengths(tmp_path_factory.mktemp("loads"), 4, 32)
    made = read_loads(file, BatchSize(8, 4))
    return MicrobatchLoads(made.squares, made.squares)


def test_a_refused_part_is_not_written(loads: MicrobatchLoads) -> None:
    free = gains(loads)
    assert free.flags == (*ORDER, *DEAL, *PROGRAM) and not free.refused
    assert free.program - free.deal > 0.01 and free.deal - free.order > 0.01
    part = gains(loads, lambda words: "no program" if "profile" in words else None)
    assert part.flags == (*ORDER, *DEAL) and part.refused == "no program"
    none = gains(loads, lambda words: "nothing goes")
    assert none.flags == () and none.refused == "nothing goes"
    assert none.program == free.program == free.most


def test_what_gains_within_a_hundredth_is_omitted(loads: MicrobatchLoads) -> None:
    """A change that gains less than a hundredth is not written, so the command gets the fewest
    flags. With one data-parallel replica there are no microbatches to deal out."""
    one = MicrobatchLoads(loads.tokens[:, :8], loads.squares[:, :8])
    alone = gains(one, replicas=1)
    assert alone.deal is None and "--pipeline-deal-microbatches" not in alone.flags
    slight = MicrobatchLoads(1 + 0.01 * loads.tokens, 1 + 0.01 * loads.squares)
    assert gains(slight).flags == ()


def test_replicas_that_share_experts_wait_for_one_another(loads: MicrobatchLoads) -> None:
    """Replicas that share experts wait for one another.

    The more replicas share experts, the longer a step takes and the more the order of microbatches
    saves. This holds if all replicas are alike and if one of them has the longest microbatches.
    """
    alone, two, four = (gains(loads, expert_replicas=shared) for shared in (1, 2, 4))
    assert alone.seconds < two.seconds < four.seconds
    assert alone.deal < two.deal < four.deal
    tokens, squares = (own.reshape(-1, 8, 4).max(axis=2) for own in (loads.tokens, loads.squares))
    assert gains(MicrobatchLoads(tokens, squares), replicas=1).seconds == pytest.approx(
        four.seconds
    )


@pytest.mark.parametrize(
    ("sizes", "replicas"),
    [((1, 1, 1, 1), 1), ((2, 1, 8, 1), 4), ((2, 2, 8, 1), 2), ((8, 1, 4, 1), 1), ((2, 1, 3, 1), 3)],
)
def test_experts_are_over_data_parallel_ranks(sizes: tuple[int, ...], replicas: int) -> None:
    names = "tensor_parallel", "context_parallel", "expert_parallel", "expert_tensor_parallel"
    own: dict[str, Any] = dict(zip(names, sizes, strict=True))
    execution = Execution(1024, **own)
    assert execution.expert_replicas == replicas


def test_flags_that_leave_the_schedule() -> None:
    assert Written(("--a",), ("--b",), ("--c", "1")).words == ("--a", "--c", "1")
