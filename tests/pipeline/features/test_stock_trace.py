"""Tests of traces of Megatron's own steps, whose pipeline functions are watched."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_ext.compile.registry import choose
from megatron_ext.observe.trace import NAME, TracedStep, read_trace
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.stock_executor import StockExecutor
from tests.helpers.fetched import megatron_sources
from tests.helpers.megatron_runs import assert_same, model_flags, train

Flags = dict[str, object]


def family_rows(spec: str, ranks: int, microbatches: int) -> list[list[str]]:
    resolved = choose(spec)
    placement = resolved.place(ranks)
    schedule = resolved.build(Problem(placement, microbatches, uniform(placement, 1, 1, 1)))
    return [[str(action) for action in row] for row in schedule.rows]


def measured_rows(traced: TracedStep) -> list[list[str]]:
    return [[str(event.action) for event in row] for row in traced.measured.compute]


# The flags of two cases. LINE: two pipelines, with evaluations between steps. LOOP: the last group
# of microbatches is larger than the pipeline and smaller than the other groups, and the run ends
# before its trace does.
LINE: Flags = {"eval_iters": 1, "eval_interval": 2, "overlap_grad_reduce": True}
LOOP: Flags = {
    "num_virtual_stages_per_pipeline_rank": 2,
    "microbatch_group_size_per_virtual_pipeline_stage": 3,
    "exit_interval": 6,
}


@pytest.mark.parametrize(
    ("ranks", "flags", "spec", "microbatches", "iterations"),
    [
        (4, LINE, "1f1b", 4, [5, 6, 7]),
        (2, LOOP, "interleaved:vpp=2,group=3", 8, [5, 6]),
    ],
    ids=["1f1b", "interleaved"],
)
def test_the_flag_alone_traces_megatrons_own_step(
    ranks: int,
    flags: Flags,
    spec: str,
    microbatches: int,
    iterations: list[int],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """--pipeline-trace alone traces Megatron's own step and changes no number. The traced passes
    have the order that our family for that schedule gives them. Users who only wished to know the
    bubble used to have to train under a schedule of ours, and to name iterations."""
    common: Flags = {"pipeline_model_parallel_size": 2, "train_iters": 7} | flags
    reference = train(ranks, model_flags(**common))
    capfd.readouterr()
    assert_same(train(ranks, model_flags(**common | {"pipeline_trace": tmp_path})), reference)
    steps = read_trace(tmp_path)
    assert [traced.iteration for traced in steps] == iterations
    for traced in steps:
        assert measured_rows(traced) == family_rows(spec, 2, microbatches)
        assert traced.weight_shares is not None and all(0 < s < 1 for s in traced.weight_shares)
        stages = len(traced.weight_shares)
        assert traced.executor == StockExecutor(overlaps=spec != "1f1b")
        first, second, *_ = traced.predicted.compute[0]
        assert second.start > first.end  # the rank waits for the send of its first output
        assert traced.parts is not None
        assert traced.parts.layers == (("*-",) * (4 // stages),) * stages
        assert min(traced.parts.last["output layer"]) > 0
    said = [line for line in capfd.readouterr().out.splitlines() if "megatron_ext: " in line]
    name = spec.partition(":")[0]
    assert re.search(
        rf"Megatron's own {name} on 2 ranks, {microbatches} microbatches: [\d.]+% of a step is "
        rf"bubble; a step takes [\d.]+ ms \(iteration [5-7], the median of {len(iterations)}\)",
        "\n".join(said),
    )
    assert sum(line.startswith("megatron_ext:   zb-h1 ") for line in said) == 1
    assert sum(line.startswith(f"megatron_ext:   {name} ") for line in said) == 1


def test_a_trace_knows_on_which_stage_multi_token_prediction_is(tmp_path: Path) -> None:
    """A trace of Megatron's step has multi-token prediction on the stage that the layout gives it.
    Traces used to have it on the last stage under any layout. (Megatron's script runs here, because
    our script always puts it on the last stage.)"""
    script = megatron_sources() / "pretrain_gpt.py"
    flags = model_flags(
        pipeline_model_parallel_size=3,
        pipeline_model_parallel_layout="Ett|ttm|L",
        mtp_num_layers=1,
        position_embedding_type="rope",
        train_iters=3,
        pipeline_trace=tmp_path,
        pipeline_trace_iters="1:2",
    )
    train(3, flags, script)
    (step,) = read_trace(tmp_path)
    assert step.parts is not None
    assert step.parts.layers == (("*-", "*-"), ("*-", "*-", "depth"), ())
    assert min(step.parts.of_layer["depth"]) > 0


def test_a_run_without_a_pipeline_says_in_one_line_that_nothing_is_traced(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(1, model_flags(train_iters=2, pipeline_trace=tmp_path, pipeline_trace_iters="1:3"))
    said = [line for line in capfd.readouterr().out.splitlines() if "megatron_ext: nothing" in line]
    assert len(said) == 1 and "the model runs on one pipeline rank" in said[0]
    assert not (tmp_path / NAME).exists()
