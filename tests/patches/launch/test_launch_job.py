"""Tests of `megatron-ext plan -- COMMAND`: the described training, the alternatives, and the flags
to write."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from megatron_ext.adapter.arguments import problems
from megatron_ext.adapter.dimensions import execution
from megatron_ext.adapter.pairs.overlap_setting import FLAG
from megatron_ext.adapter.slices.lengths import lengths_in
from megatron_ext.base import progress
from megatron_ext.base.progress import reporting
from megatron_ext.cli import app
from megatron_ext.commands.verdict_text import verdict_lines
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.config import PipelineConfig
from megatron_ext.cost_model.description import describe
from megatron_ext.cost_model.estimate import estimate
from megatron_ext.cost_model.gpus import GPUS, RESERVED_SHARE, USABLE, parse_gpu
from megatron_ext.cost_model.measured.file import as_data, load_measured
from megatron_ext.cost_model.measured.layer_costs import Basis, layer_costs
from megatron_ext.cost_model.measured.machine_factors import MachineFactors, ProductShape
from megatron_ext.cost_model.measured.scale import Measured, Scale
from megatron_ext.cost_model.measured.timed_operations import (
    GATHERED,
    AttentionShape,
    timed_attention,
    timed_collectives,
    timed_products,
)
from megatron_ext.cost_model.measured_costs import Machine
from megatron_ext.cost_model.model import stages_of
from megatron_ext.cost_model.operations.operation import Exchange, Group, Passes, linear
from megatron_ext.cost_model.operations.parts import part_of
from megatron_ext.launch.command import megatron_arguments
from megatron_ext.launch.command.launch_words import Launch, read_launch
from megatron_ext.launch.doctor.check import check_launch
from megatron_ext.launch.planner import launch_job, parsed_launch
from megatron_ext.launch.planner.alternatives import (
    first_answer,
    less_memory,
    pairs,
)
from megatron_ext.launch.planner.alternatives.written import written_for
from megatron_ext.launch.planner.launch_plan import plan_launch
from megatron_ext.launch.planner.parsed_launch import LaunchRequest
from megatron_ext.observe.trace import TraceFile, traced_step
from megatron_ext.planner import planner
from megatron_ext.planner.candidate import Candidate, Plan, VocabMethod
from megatron_ext.planner.job_plan import JobPlan
from megatron_ext.planner.layouts.layout import Layout
from megatron_ext.planner.planning_time import planning, until_end
from megatron_ext.planner.verdict import NOTHING, Written
from megatron_ext.schedule import placement
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.costs_text import save_costs
from megatron_ext.schedule.rank_speeds import RankSpeeds
from tests.helpers.few_families import only_families
from tests.helpers.megatron_runs import SCRIPT, model_flags
from tests.helpers.saved_checkpoints import write
from tests.helpers.schedules import line_problem, program
from tests.unit.model.test_machine_factors import GPU, VERSIONS, Emulated

FLAGS: dict[str, Any] = {
    "pipeline_model_parallel_size": 2,
    "num_virtual_stages_per_pipeline_rank": 4,
    "num_layers": 16,
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "seq_length": 1024,
    "max_position_embeddings": 1024,
    "use_distributed_optimizer": True,
    "bf16": True,
    "padded_vocab_size": 32000,
    "vocab_size": 31999,
}

NO_VIRTUAL: dict[str, Any] = {"num_virtual_stages_per_pipeline_rank": None}


@pytest.fixture(autouse=True)
def few_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulate a login node without a GPU, and compare four families without a search."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    only_families(monkeypatch, "1f1b", "interleaved", "zb-h1", "zb-v")
    monkeypatch.setattr(parsed_launch, "_METHODS", frozenset([VocabMethod.NAIVE, VocabMethod.TWO]))
    monkeypatch.setattr(launch_job, "_layouts", lambda read: None)  # test_layouts.py tests layouts


def launch(**overrides: object) -> Launch:
    return Launch(str(SCRIPT), False, tuple(model_flags(**(FLAGS | overrides))), world_size=4)


def made(gpu: str | None = "h100", **overrides: object) -> JobPlan:
    return plan_launch(
        LaunchRequest(launch(**overrides), gpu=None if gpu is None else parse_gpu(gpu))
    )


def taken_of(plan: JobPlan) -> Candidate:
    assert plan.verdict.taken is not None
    return plan.verdict.taken.candidate


def own_of(plan: JobPlan) -> Candidate:
    """Return the candidate of the command as it is given."""
    assert plan.verdict.baseline is not None
    return plan.verdict.baseline.candidate


def command(*words: str) -> Result:
    return CliRunner().invoke(app, ["plan", *words])


def test_sparse_attention_has_no_estimate() -> None:
    """`plan` gives no estimate for a model with sparse attention, unless the user gives the times
    of passes. It used to plan with the seconds of plain attention, a fifth to five times those of
    published steps."""
    sparse: dict[str, Any] = {
        "experimental_attention_variant": "dsa",
        "multi_latent_attention": True,
        "disable_bias_linear": True,
        "qk_layernorm": True,
        "normalization": "RMSNorm",
    }
    with pytest.raises(ValueError, match=r"^no estimate: how long sparse attention \(dsa\) takes"):
        made(**sparse)
    times = ("--pipeline-costs", "f=10,i=12,w=8,comm=1")
    request = LaunchRequest(launch(**sparse), gpu=parse_gpu("h100"), settings=times)
    assert taken_of(plan_launch(request)).step > 0


def test_a_launch_with_virtual_stages() -> None:
    """`plan` compares a launch with four chunks a rank with schedules that have other numbers of
    chunks. It used to refuse such a launch, because a linear placement has one chunk a rank and a V
    two."""
    plan = made()
    assert plan.job.startswith("16 layers on 4 ranks (PP 2 x DP 2), 4 microbatches of 1 x 1024")
    assert plan.job.endswith("under interleaved:vpp=4")
    taken = taken_of(plan)
    assert taken.step <= 0.98 * own_of(plan).step
    assert plan.written.added[:2] == ("--pipeline-schedule", taken.schedule)
    schedules = {c.schedule for c in plan.plan.candidates}
    assert schedules >= {"1f1b", "zb-h1", "zb-v", "interleaved:vpp=4"}
    assert plan.written.dropped == ("--num-virtual-stages-per-pipeline-rank",)
    assert not plan.remarks and not plan.fallbacks


def test_an_assumed_vocabulary_is_mentioned_with_the_verdict() -> None:
    """If the size of the vocabulary is unknown, `plan` assumes one, and says so next to its
    verdict. A launch with a tokenizer from a hub used to be planned without embedding and output
    layer: with the tokenizer's 50,432 tokens the recommended layout was 5 % slower than Megatron's
    best, and only a remark after the command mentioned the vocabulary."""
    of_hub: dict[str, Any] = {"vocab_size": None, "tokenizer_type": "HuggingFaceTokenizer"}
    unknown = made(padded_vocab_size=None, tokenizer_model="hub/tokenizer", **of_hub)
    known = made(padded_vocab_size=128_000)
    assert own_of(unknown).step == pytest.approx(own_of(known).step, rel=1e-3)
    assert own_of(unknown).fullest == pytest.approx(own_of(known).fullest, rel=1e-3)
    assert unknown.written == known.written and not known.assumed
    (line,) = (row for row in verdict_lines(unknown) if row.startswith("assumed:"))
    assert "a vocabulary of 128,000 tokens, since its tokenizer is not here" in line
    assert line.endswith(": add --padded-vocab-size N")
    # The flags of the verdict are also judged with a smaller and a larger vocabulary.
    of_others = re.findall(r"save ([\d.]+)% with (\d+,\d+)", line)
    assert [tokens for _, tokens in of_others] == ["32,000", "256,000"]
    small: dict[str, Any] = {"padded_vocab_size": 32_000}
    now, flags = made(**small), model_flags(**(FLAGS | small | NO_VIRTUAL))
    changed = Launch(str(SCRIPT), False, (*flags, *unknown.written.added), world_size=4)
    then = plan_launch(LaunchRequest(changed, gpu=parse_gpu("h100")))
    seconds = [plan.verdict.baseline.seconds for plan in (now, then) if plan.verdict.baseline]
    assert float(of_others[0][0]) / 100 == pytest.approx(1 - seconds[1] / seconds[0], abs=0.001)


def test_an_assumed_vocabulary_of_what_fits_nowhere_does_not_hide_the_remedies() -> None:
    """`plan` names remedies if nothing fits, also with an assumed vocabulary. A plan for a 70B
    model with a hub's tokenizer on GPUs with 40 GB used to end in an AssertionError."""
    of_hub: dict[str, Any] = {"vocab_size": None, "tokenizer_type": "HuggingFaceTokenizer"}
    plan = made(
        "operations=400e12,bytes=40e9,memory=1.6GiB",
        padded_vocab_size=None,
        tokenizer_model="hub/tokenizer",
        **of_hub,
    )
    assert plan.verdict.taken is None and plan.verdict.baseline is not None
    assert plan.fallbacks and plan.assumed.endswith(": add --padded-vocab-size N")


def heard_of(gpu: str, monkeypatch: pytest.MonkeyPatch) -> tuple[JobPlan, str]:
    """Return the plan, and the line that it printed as its first answer."""
    monkeypatch.setattr(progress, "_REMARKS", set())
    heard: list[str] = []
    with planning() as time, reporting(lambda text: None, heard.append):
        plan = made(gpu)
    assert time.first_answer is not None and not time.is_short
    (first,) = (text for text in heard if text.startswith("a first answer: "))
    return plan, first


def test_first_answer_is_given_where_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    _, first = heard_of("operations=400e12,bytes=40e9,memory=1.6GiB", monkeypatch)
    assert "nothing fits so far" in first


def test_first_answer_does_not_wait_for_what_recompute_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`plan` prints a first answer before it has tried recompute, even if nothing fits without
    recompute. For 405 billion parameters on 16 ranks the first line used to come after 52
    seconds."""

    def make_plan(variant_of: Any, *arguments: Any, **more: Any) -> Plan:
        if not variant_of.__self__.tries_recompute:
            return planner.make_plan(variant_of, *arguments, **more)
        return until_end(wait, Plan((), {("zb-v", VocabMethod.NAIVE): planner.NO_TIME}))

    def wait() -> Plan:
        while True:
            pass

    monkeypatch.setattr(first_answer, "make_plan", make_plan)
    monkeypatch.setattr(progress, "_REMARKS", set())
    heard: list[str] = []
    with planning(4) as time, reporting(lambda text: None, heard.append):
        made("operations=400e12,bytes=40e9,memory=1.6GiB")
    assert time.first_answer is not None and time.first_answer < 0.5 * time.limit
    (first,) = (text for text in heard if text.startswith("a first answer: "))
    assert "how much recompute would fit is not known yet" in first


def test_comparison_gives_a_first_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """`plan` prints a first answer before it compares all schedules. On 16 ranks with 128
    microbatches it used to print nothing for minutes."""
    whole, first = heard_of("h100", monkeypatch)
    assert first.startswith("a first answer: --pipeline-schedule zb-v")
    assert " shorter, as estimated; others are compared now" in first
    monkeypatch.setattr(first_answer, "LONG", 8)
    plan = made()
    assert plan.written == whole.written and own_of(plan).step == own_of(whole).step
    whys = plan.plan.refusals.values()
    assert any("every order of the passes takes at least" in why for why in whys)
    assert ("interleaved", VocabMethod.NAIVE) not in plan.plan.refusals


def test_memory_is_that_of_doctor() -> None:
    plan = made()
    memory = own_of(plan).memory
    assert memory is not None
    prediction = check_launch(launch(), None, None).prediction
    assert prediction is not None and prediction.schedule == "interleaved"
    assert [rank.total for rank in memory] == [rank.total_bytes for rank in prediction.ranks]


def test_doctor_assumes_the_vocabulary_that_a_plan_assumes(tmp_path: Path) -> None:
    """`doctor` predicts memory with the vocabulary that `plan` assumes, and neither judges a
    checkpoint by it. `doctor` used to predict 16 GiB without a vocabulary where `plan` predicted 34
    GiB, and `plan` compared the assumed size with the rows of a checkpoint."""
    of_hub: dict[str, Any] = {
        "vocab_size": None,
        "padded_vocab_size": None,
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": "hub/tokenizer",
        "load": saved(tmp_path, "dp_reshardable", **NO_VIRTUAL),
    }
    unknown = check_launch(launch(**of_hub, **NO_VIRTUAL), None, None)
    known = check_launch(launch(padded_vocab_size=128_000, **NO_VIRTUAL), None, None)
    assert unknown.prediction is not None and unknown.prediction == known.prediction
    texts = [finding.text for finding in unknown.findings]
    assert any("128,000 tokens are assumed" in text for text in texts)
    asked = LaunchRequest(launch(**of_hub, **NO_VIRTUAL), gpu=parse_gpu("h100"))
    texts += parsed_launch.with_launch(
        asked, lambda parsed: list(launch_job.on_loading(asked, parsed, NOTHING))
    )
    loading = [text for text in texts if "loads whole" in text]
    assert len(loading) == 2 and not any(" rows" in text for text in texts), texts


def test_a_layout_is_cut_anew() -> None:
    """`plan` writes a new layout, as even as possible, for schedules that have another number of
    stages than the launch's layout."""
    layout = "Et|t|t|t|t|t|t|L"
    plan = made(
        num_layers=7,
        num_virtual_stages_per_pipeline_rank=None,
        pipeline_model_parallel_layout=layout,
    )
    assert own_of(plan).schedule == "interleaved:vpp=4"
    assert plan.written.dropped == ("--pipeline-model-parallel-layout",)
    assert plan.written.added[-2:] == ("--pipeline-model-parallel-layout", "Et*4|tttL")


def test_a_file_of_arguments_is_as_good_as_a_command(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        **{name: value for name, value in FLAGS.items() if name != "num_layers"},
        **{"num_layers": 16, "world_size": 4, "micro_batch_size": 1, "global_batch_size": 8},
        **{"train_iters": 5, "lr": 0.01, "eval_iters": 0, "num_moe_experts": None},
    }
    (tmp_path / "model.json").write_text(json.dumps(values))
    result = command("--gpu", "h100", "--json", str(tmp_path / "model.json"))
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    expected = made()
    assert told["job"] == expected.job
    assert told["written"]["added"] == list(expected.written.added)
    (tmp_path / "model.json").write_text(json.dumps({**values, "hiden_size": 3}))
    result = command(str(tmp_path / "model.json"))
    assert result.exit_code == 2 and "no argument hiden_size: did you mean hidden_size" in (
        result.output
    )


def test_what_is_printed(tmp_path: Path) -> None:
    words = ["--gpu", "h100", "--world-size", "4", "--", str(SCRIPT), *model_flags(**FLAGS)]
    output = command(*words).stdout
    assert "under interleaved:vpp=4" in output and "\nmemory:    " in output
    assert "in place of --num-virtual-stages-per-pipeline-rank" in output
    assert len(output.splitlines()) <= 10 and "makespan" not in output
    (written,) = (row for row in output.splitlines() if row.startswith("-m megatron_ext "))
    assert check_launch(read_launch(shlex.split(written)), 4, None).is_right
    assert "memory under" in command("--all", *words).output
    beside = command("pp=4,m=8", *words)
    assert beside.exit_code == 2 and "are two jobs: give only one of the two" in beside.output
    assert "a plan needs a job: a launch command behind --" in command().output


def test_what_is_assumed_is_said() -> None:
    plan = made(None, spec=("mine", "layers"))
    assert any("an H100's" in remark for remark in plan.remarks)
    assert any("--spec mine layers: layers of your own" in remark for remark in plan.remarks)
    megatrons = ("megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec")
    assert not any("--spec" in remark for remark in made(None, spec=megatrons).remarks)


def test_one_pipeline_rank_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """`plan` for one pipeline rank prints one line. It used to print thirty lines, each of which
    refused one schedule."""
    flags = FLAGS | {
        "pipeline_model_parallel_size": 1,
        "num_virtual_stages_per_pipeline_rank": None,
        "pipeline_schedule": None,
        "hidden_size": 16384,
        "num_attention_heads": 128,
        "num_layers": 80,
    }
    words = ["--gpu", "h100", "--world-size", "1", "--", str(SCRIPT), *model_flags(**flags)]
    result = command(*words)
    assert result.exit_code == 2 and "no schedule fits" in result.output
    assert "needs a pipeline" not in result.output
    assert result.output.count("there is one pipeline rank, so no schedule can be chosen") == 1
    assert len(result.output.splitlines()) <= 8, result.output
    monkeypatch.setattr(parsed_launch, "_on_costs", lambda *arguments: iter(()))
    assert "needs a pipeline" not in command(*words).output


def measured_file(folder: Path, **overrides: object) -> Path:
    """Write a file of measured costs of the launch, and return its path: three times the estimate
    for layers with experts, half of the estimate for dense layers."""
    args = megatron_arguments.parse_arguments(model_flags(**(FLAGS | EXPERTS | overrides))).args
    with megatron_arguments.on_gpus(args):
        megatron_arguments.validate(args, PipelineConfig(), 4)
        model, run = describe(args), execution(args, args.seq_length, args.micro_batch_size)
    stages = stages_of(model, [3, 3, 2, 2, 2, 2, 1, 1])
    rates = GPUS["a100"].rates()
    scales = (("*-", Scale(0.5, 0.5, 0.5)), ("*E", Scale(3.0, 3.0, 3.0)))
    truth = replace(rates, measured=Measured(scales, Scale()))
    costs = replace(estimate(model, stages, run, truth), origin="measured: here")
    layers = layer_costs(costs, Basis(model, stages, run, rates), is_divided=False)
    machine = Machine({False: 1e-4, True: 2e-3}, 2, 5 * 2.0**30)
    path = folder / "costs.json"
    save_costs(costs, path, as_data(layers, machine))
    return path


EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "moe_layer_freq": "([0]*8+[1]*8)",
    "moe_ffn_hidden_size": 4096,
    "num_virtual_stages_per_pipeline_rank": None,
}


def test_a_launch_is_planned_by_what_was_measured_per_layer_type(tmp_path: Path) -> None:
    """`plan` uses costs that were measured by layer type for all layouts. A launch under stock's
    schedule that names no costs itself may be planned by them too; such a launch used to be
    refused."""
    path = measured_file(tmp_path)
    asked = LaunchRequest(launch(**EXPERTS), gpu=parse_gpu("h100"))
    estimated = plan_launch(asked)
    plan = plan_launch(replace(asked, settings=("--pipeline-costs", str(path))))
    assert estimated.is_estimate and not plan.is_estimate
    assert own_of(plan).schedule == "1f1b"
    assert plan.written.added[-2:] == ("--pipeline-costs", str(path))
    assert plan.free is not None
    assert plan.free.reserved == 5 * 2**30 and not plan.free.is_modelled
    assert any("by layer type (measured: here)" in remark for remark in plan.remarks)
    assert own_of(plan).step > 1.5 * own_of(estimated).step


def test_a_launch_of_another_size_is_planned_by_a_machines_factors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`plan` predicts a launch with tensor parallelism from factors that were measured on the same
    (emulated) machine without it: every schedule takes as long as on that machine. With measured
    costs by layer type, and without factors, every prediction is wrong."""
    dense = {"num_virtual_stages_per_pipeline_rank": None, "hidden_size": 2048}
    other = launch(**dense, tensor_model_parallel_size=2)
    with megatron_arguments.on_gpus(
        launch_args := megatron_arguments.parse_arguments(launch(**dense).arguments).args
    ):
        megatron_arguments.validate(launch_args, PipelineConfig(), 4)
        model, run = describe(launch_args), execution(launch_args, 1024, 1)
    sheet, stages = GPUS["h100"].rates(), stages_of(model, [8, 8])
    true = replace(
        sheet, factors=Emulated(GPU, VERSIONS, "bf16"), measured=Measured((), others=Scale())
    )

    def seconds_of(shape: ProductShape) -> float:
        product, *_ = linear("product", shape[0], shape[2], shape[1], run)
        return true.seconds_of(product)[0]

    def attention_seconds(shape: AttentionShape) -> tuple[float, float]:
        heads = replace(run, tensor_parallel=model.num_attention_heads // shape[2])
        operation = next(o for o in part_of("*", model, heads).operations if o.is_attention)
        forward, backward, _ = true.seconds_of(operation)
        return forward, backward

    gathers = {
        float(size): true.seconds_to_exchange(Exchange(Group.TENSOR, 2, 1, Passes(size, 0.0)))[0]
        for size in GATHERED
    }
    factors = MachineFactors(
        GPU,
        VERSIONS,
        "bf16",
        timed_products(model, run, sheet, seconds_of),
        timed_collectives(Group.TENSOR, 2, 1, sheet, gathers),
        (),
        *timed_attention(model, run, sheet, attention_seconds),
    )
    costs = estimate(model, stages, run, true)
    machine = Machine({}, 8, None)

    def file(name: str, measured: MachineFactors | None) -> Path:
        basis = Basis(model, stages, run, replace(sheet, factors=measured))
        layers = layer_costs(costs, basis, is_divided=False)
        save_costs(costs, tmp_path / name, as_data(layers, machine))
        return tmp_path / name

    path, by_layers = file("costs.json", factors), file("layers.json", None)

    def planned(gpu: str, costs: Path) -> JobPlan:
        settings = ("--pipeline-costs", str(costs))
        return plan_launch(LaunchRequest(other, gpu=parse_gpu(gpu), settings=settings))

    def steps(plan: JobPlan) -> dict[tuple[str, VocabMethod], float]:
        return {(c.schedule, c.method): c.step for c in plan.plan.candidates}

    told, alone = planned("h100", path), planned("h100", by_layers)
    assert any(f"a machine with {GPU}" in remark for remark in told.remarks)
    with pytest.raises(ValueError, match=f"measured on {GPU}, and the GPU to plan for is a100"):
        planned("a100", path)
    read = load_measured(path)
    assert read is not None
    truth = replace(read, rates=true)
    monkeypatch.setattr(parsed_launch, "load_measured", lambda *_: truth)
    there = planned("h100", path)
    assert steps(told) == pytest.approx(steps(there), rel=0.02)
    assert taken_of(told).schedule == taken_of(there).schedule
    assert steps(alone) != pytest.approx(steps(there), rel=0.05)


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ({"context_parallel_size": 2}, "context parallelism"),
        ({}, ""),
    ],
)
def test_a_plan_says_what_no_measurement_has_checked(flags: dict[str, Any], what: str) -> None:
    """`plan` says once, in its text and as data, which parts of its estimate no measurement has
    checked. It does not say so of dense layers in bf16, which the measurements on A100s cover."""
    words = ["--gpu", "a100", "--world-size", "4", "--", "torchrun", str(SCRIPT)]
    words += model_flags(**(FLAGS | flags))
    text = command(*words)
    data = json.loads(command("--json", *words).stdout)
    remarks = [remark for remark in data["remarks"] if "not checked" in remark]
    if what:
        assert text.output.count(f"not checked against measurements: {what}") == 1
        assert remarks == [f"not checked against measurements: {what}"]
    else:
        assert "not checked" not in text.output and not remarks


def test_room_is_left_for_what_a_model_says_of_the_allocator() -> None:
    """`plan` reserves memory for the GPU's allocator by its model of the allocator. Without a trace
    it used to reserve none. On this GPU the first choice fits only if nothing is reserved."""
    asked = LaunchRequest(launch())
    without = plan_launch(asked)
    assert without.free is None and without.plan.best is not None
    fullest = without.plan.best.fullest
    own = without.verdict.baseline
    assert fullest is not None and own is not None and own.candidate.memory is not None
    lasting = min(rank.model.lasting for rank in own.candidate.memory)
    usable = fullest + RESERVED_SHARE / 2 * (fullest - lasting)
    gpu = replace(parse_gpu("h100"), memory=usable / USABLE)
    plan = plan_launch(replace(asked, gpu=gpu))
    assert plan.free is not None and plan.free.is_modelled
    reserved = plan.free.reserved
    assert reserved == pytest.approx(RESERVED_SHARE * (usable - reserved - lasting), rel=0.01)
    best = plan.plan.best
    assert best is not None and best.fullest is not None and best.fullest < fullest
    assert best.fullest + reserved <= usable


def test_room_is_left_for_what_a_trace_has_measured_of_the_allocator(tmp_path: Path) -> None:
    """`plan --trace` reserves as much memory as the trace measured for the allocator. Only a
    measured costs file of our schedules used to have these bytes, but users begin with a trace of
    Megatron's own schedule."""
    whole = program("1f1b", line_problem(2, 4, 10, 12, 8, 1))
    timeline = simulate(whole, whole.problem.costs)
    passes = tuple(event for row in timeline.compute for event in row)
    step = traced_step(5, replace(timeline, events=passes), timeline, 0.0)
    TraceFile(tmp_path / "trace.json").add(replace(step, reserved=(2.0**30, 74.2 * 2.0**30)))
    words, launch_of_two = (
        ["--all", "--gpu", "h100", "--world-size", "4"],
        ["--", str(SCRIPT), *model_flags(**FLAGS)],
    )
    output = command(*words, "--trace", str(tmp_path), *launch_of_two).output
    assert "in addition the allocator reserves 74.2 GiB, which the plan leaves free" in output
    without = command(*words, *launch_of_two).output
    limits = [
        set(re.findall(r"--pipeline-memory-limit [\d.]+([MG])iB", text))
        for text in (output, without)
    ]
    # Without a trace the plan writes a limit only if the limit changes something. That depends on
    # which candidates the plan had time to compare.
    assert limits[0] == {"M"} and limits[1] <= {"G"}
    assert "--trace DIR" in without and "assumed, not measured" in without
    TraceFile(tmp_path / "cpu.json").add(step)
    on_cpu = command(*words, "--trace", str(tmp_path / "cpu.json"), *launch_of_two)
    assert on_cpu.exit_code == 2 and "has nothing that a plan uses" in on_cpu.output
    model = "layers=16,hidden=1024,heads=8,sequence=1024,vocabulary=32000"
    described = (f"{model},pp=4,m=8", "--gpu", "h100", "--json")
    alone = json.loads(command(*described, "--trace", str(tmp_path / "trace.json")).stdout)
    assert alone["free"]["reserved"] == 74.2 * 2.0**30 and not alone["free"]["is_modelled"]


def test_a_costs_file_of_before_has_costs_for_its_own_stages(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    save_costs(uniform(placement.line(2), 1e-2, 1e-2, 1e-2), path)
    asked = LaunchRequest(launch(num_virtual_stages_per_pipeline_rank=None), gpu=parse_gpu("h100"))
    plan = plan_launch(replace(asked, settings=("--pipeline-costs", str(path))))
    assert {c.schedule for c in plan.plan.candidates} == {"1f1b", "zb-h1"}
    assert any("measured anew, it has them per layer type" in remark for remark in plan.remarks)


def test_flags_that_megatron_does_not_know_are_a_remark() -> None:
    """`plan` remarks on flags that Megatron does not know, as `doctor` does. It used to say
    nothing, and the command that it wrote would have been refused because of them."""
    words = (*launch().arguments, "--use-z-loss")
    plan = plan_launch(LaunchRequest(replace(launch(), arguments=words), gpu=parse_gpu("h100")))
    (remark,) = plan.remarks
    assert "has no flag --use-z-loss; drop it, unless the script adds it" in remark


def test_a_launch_that_fits_nowhere_says_what_would_have_to_give() -> None:
    plan = made("operations=400e12,bytes=40e9,memory=1.6GiB")
    assert plan.verdict.taken is None and not plan.written.added
    assert any(text.startswith("--recompute-granularity full: ") for text in plan.fallbacks)
    assert any("GiB too much" in text or "which fits" in text for text in plan.fallbacks)


def test_what_does_not_fit_is_recomputed_if_the_launch_accepts_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`plan` tries recompute for a launch that does not fit, unless a recomputed pass could not
    restore its random states (here --te-rng-tracker with dropout). It used to try only offload,
    although the schedules 1f1b and zb-h1 fit with half of the activations recomputed."""
    # Memory of a GPU: 3.33 GiB are left without the allocator's reserve.
    small = "operations=400e12,bytes=40e9,memory=3.38GiB"
    plan, first = heard_of(small, monkeypatch)
    assert "--pipeline-recompute fit, as estimated" in first
    best = plan.plan.best
    assert best is not None and best.report.options.recompute.fit and best.report.recomputed > 0
    assert 101 * 2**20 < plan.verdict.excess < 102 * 2**20
    # With these settings, random states cannot be restored for a recompute. A launch refuses
    # recompute then, and the plan does not propose it.
    refused = made(small, te_rng_tracker=True, hidden_dropout=0.1).plan
    assert all(
        not candidate.report.options.requests("recompute") for candidate in refused.candidates
    )


def test_full_recompute_is_compared_with_what_there_is_without_it() -> None:
    full = {"granularity": "full", "method": "uniform", "num_layers": 1}
    flags = {f"recompute_{name}": value for name, value in full.items()}
    plan = made("h100", **flags)
    (without,) = plan.others
    assert without.seconds < plan.plan.candidates[0].step
    assert taken_of(plan).schedule == without.candidate.schedule
    # The alternative has all flags of the plan, and perhaps a limit, which the plan omits if it has
    # no effect.
    assert set(plan.written.added) <= set(without.write().added)
    dropped = {f"--{name.replace('_', '-')}" for name in flags}
    assert dropped <= set(plan.written.dropped)
    assert not made().others


def saved(folder: Path, kind: str, **overrides: object) -> Path:
    """Write the metadata of a checkpoint of the launch whose optimizer states have the format
    ``kind``, and return its folder."""
    words = launch(**overrides).arguments
    with megatron_arguments.on_gpus(args := megatron_arguments.parse_arguments(words).args):
        megatron_arguments.validate(args, PipelineConfig(), 4)
    metadata = {"distrib_optim_sharding_type": kind}
    write(folder / "iter_0000005", {"args": args, "content_metadata": metadata})
    (folder / "latest_checkpointed_iteration.txt").write_text("5")
    return folder


def test_whether_a_checkpoint_can_be_loaded(tmp_path: Path) -> None:
    """`plan` says whether the launch's checkpoint loads under the command that it writes. It used
    to compare only which rank has which stage, and to say that a checkpoint "can be loaded,
    optimizer states too", although the written command could not load it."""
    (remark,) = made(load=saved(tmp_path / "a", "dp_reshardable")).remarks
    why = "the checkpoint's optimizer states (dp_reshardable) can only be loaded if each stage is"
    assert f"does not load: {why}" in remark
    assert "train one step under the old command with --dist-ckpt-optim-fully-resh" in remark
    (remark,) = made(load=tmp_path / "a", no_load_optim=True).remarks
    assert remark.endswith("loads weights only: as of --no-load-optim")
    (remark,) = made(load=saved(tmp_path / "b", "fully_reshardable")).remarks
    assert "loads whole: weights, optimizer states" in remark
    (remark,) = made(load=tmp_path / "nowhere").remarks
    assert "is not judged, since it is not here" in remark


def test_the_checkpoint_of_a_kept_command_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`plan` judges the checkpoint of a command that it leaves as it is. It used to say nothing,
    although Megatron's own command could not load its checkpoint."""
    only_families(monkeypatch, "1f1b")
    monkeypatch.setattr(parsed_launch, "_METHODS", frozenset([VocabMethod.NAIVE]))
    kept = made(load=saved(tmp_path, "dp_reshardable"), **NO_VIRTUAL)
    assert kept.verdict.keeps and "does not load" in kept.remarks[0]


def test_weights_of_a_pretrained_checkpoint_are_judged(tmp_path: Path) -> None:
    """`plan` judges the checkpoint of --pretrained-checkpoint, as `doctor` does. It used to say
    nothing of that flag."""
    folder = saved(tmp_path / "a", "dp_reshardable")
    (remark,) = made(pretrained_checkpoint=folder, load=tmp_path / "new").remarks
    assert remark.startswith("--pretrained-checkpoint") and "loads weights only" in remark
    (remark,) = made(pretrained_checkpoint=folder, load=folder).remarks
    assert remark.startswith("--load") and "does not load" in remark


def test_a_layout_alone_moves_optimizer_states(tmp_path: Path) -> None:
    """`plan` judges the checkpoint if it changes only the layout, because stages then have other
    optimizer states. A plan that changed the layout and not the schedule used to say nothing of the
    checkpoint."""
    flags = {"load": saved(tmp_path, "dp_reshardable", **NO_VIRTUAL), **NO_VIRTUAL}
    asked = LaunchRequest(launch(**flags), gpu=parse_gpu("h100"))
    layout = ("--pipeline-model-parallel-layout", "E" + "t" * 9 + "|" + "t" * 7 + "L")

    def said(written: Written) -> list[str]:
        return parsed_launch.with_launch(
            asked, lambda parsed: list(launch_job.on_loading(asked, parsed, written))
        )

    (kept,), (moved,) = said(NOTHING), said(Written(added=layout))
    assert "loads whole" in kept
    assert "pipeline rank 0 had the embedding and layers 1 to 8, and has the embedding and" in moved


def test_things_that_do_not_suffice_alone_are_named_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If nothing fits, `plan` names single changes that would be enough. Two changes are named
    together only if neither is enough, and a change that does not help is not named."""
    gib = 2.0**30
    args = SimpleNamespace(
        recompute_granularity=None,
        tensor_model_parallel_size=1,
        expert_model_parallel_size=4,
        pipeline_model_parallel_size=2,
        num_experts=8,
        use_distributed_optimizer=True,
        micro_batch_size=1,
    )

    def fullest(variants: Any) -> float:
        given = variants if isinstance(variants, dict) else {}
        taken = 100.0
        taken -= 30 * ("recompute_granularity" in given)
        taken -= 20 * (given.get("expert_model_parallel_size", 4) == 8)
        return taken * gib

    monkeypatch.setattr(less_memory, "_fullest", fullest)
    variants = SimpleNamespace(args=args, with_values=lambda values: dict(values))
    assert list(less_memory.what_would_fit(variants, 52 * gib)) == [  # type: ignore[arg-type]
        "--recompute-granularity full: the fullest rank would take 70 GiB, 18 GiB too much",
        "--expert-model-parallel-size 8: the fullest rank would take 80 GiB, 28 GiB too much",
        "--recompute-granularity full and --expert-model-parallel-size 8: the fullest rank would "
        "take 50 GiB, which fits",
    ]
    assert list(less_memory.what_would_fit(variants, 85 * gib)) == [  # type: ignore[arg-type]
        "--recompute-granularity full: the fullest rank would take 70 GiB, which fits",
        "--expert-model-parallel-size 8: the fullest rank would take 80 GiB, which fits",
    ]


LONG: dict[str, Any] = {
    "num_virtual_stages_per_pipeline_rank": None,
    **{"seq_length": 32768, "max_position_embeddings": 32768},
    **{"hidden_size": 2048, "num_attention_heads": 16},
}


def test_a_launch_of_long_sequences_is_compared_with_slices_of_them() -> None:
    plan = made(**LONG, global_batch_size=2)  # two ranks with one microbatch each
    compared = plan.long_sequences
    assert compared is not None
    shown = {way.words for way in compared.alternatives}
    assert shown >= {
        *("whole sequences", "2 slices", "4 slices", "8 slices"),
        *("--recompute-granularity full", "--context-parallel-size 2, DP 1"),
    }
    assert all(way.candidates for way in compared.alternatives)
    flags = " ".join(compared.written.added)
    assert re.search(
        r"--pipeline-schedule \S+ .*--pipeline-slices [248] .*lengths balanced$", flags
    )
    with_enough_microbatches = made(**LONG).long_sequences
    assert with_enough_microbatches is None or not with_enough_microbatches.written.added


def test_slices_are_compared_where_a_launch_would_take_them() -> None:
    """`plan` proposes slices of a sequence only if the checks of a launch accept them. Experts with
    a capacity would drop tokens slice by slice, so slices are refused here."""
    refused = made(**(LONG | EXPERTS), moe_expert_capacity_factor=1.0).long_sequences
    assert refused is not None and refused.best is None and not refused.written.added
    whys = {way.words: way.why_not for way in refused.alternatives if not way.candidates}
    assert all("experts would drop tokens slice by slice" in why for why in whys.values())
    assert set(whys) == {"2 slices", "4 slices", "8 slices"}


ON_TWO_RANKS: dict[str, Any] = {
    "num_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 1024,
    "moe_token_dispatcher_type": "alltoall",
    "expert_model_parallel_size": 2,
    "moe_grouped_gemm": False,
    "add_bias_linear": False,
}


def test_of_a_launch_with_experts_it_says_what_pairs_would_give(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pairs, "_specs", lambda *, with_pairs: iter(["interleaved", "zb-v"]))
    plan = made(**ON_TWO_RANKS)
    assert {one.candidate.family for one in plan.others} >= {"interleaved"}
    best = min(plan.others, key=lambda one: one.seconds)
    assert best.candidate.report.pairs > 0
    assert best.write().added.count(FLAG) == 1  # the flag used to be written twice
    alone = {(c.schedule, c.method): c for c in plan.plan.candidates}
    same = alone[best.candidate.schedule, VocabMethod.NAIVE]
    assert same.report.pairs == 0
    assert best.candidate.step < same.step


def test_a_launch_whose_passes_run_in_pairs_is_compared_with_itself_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pairs, "_specs", lambda *, with_pairs: iter(["interleaved", "zb-v"]))
    plan = made(**ON_TWO_RANKS, overlap_moe_expert_parallel_comm=True)
    best = plan.plan.best
    assert best is not None and best.report.pairs > 0
    (other,) = plan.others
    assert other.candidate.report.pairs == 0
    asked = SimpleNamespace(overlap_moe_expert_parallel_comm=True)
    layout = Layout((4, 4, 4, 4))
    written = written_for(asked, (best.schedule, layout), best, layout)
    assert FLAG not in written.added and not written.dropped  # the launch has the flag already
    # The launch would train with overlapped passes, but this candidate has none, so its command
    # drops the flag.
    assert FLAG in other.write().dropped


def test_of_experts_on_one_rank_it_says_nothing_of_pairs() -> None:
    assert not made().others


def test_slices_have_attention_estimated_where_costs_do_not_tell_it(tmp_path: Path) -> None:
    """Balanced slices take attention's share of the work from the estimate if the costs do not say
    it. Without that share, slices that should be balanced used to have equal lengths."""
    save_costs(uniform(placement.line(2), 1e-2, 1e-2, 1e-2), tmp_path / "costs.json")
    args = megatron_arguments.parse_arguments(model_flags(**(FLAGS | LONG))).args
    config = PipelineConfig.parse(
        schedule="zb-h1", slices="4", slice_lengths="balanced", costs=str(tmp_path / "costs.json")
    )
    with megatron_arguments.on_gpus(args):
        megatron_arguments.validate(args, config, 4)
        *_, problem = problems(args, config)
        first, *_, last = lengths_in(problem, args, args.seq_length)
    assert "attention and short slices in estimated proportions" in problem.costs.origin
    assert all(len(problem.costs.slices.fixed[kind]) == 2 for kind in problem.costs.seconds)
    assert first > 1.3 * last


# ---- stages and ranks of different speeds


EXAMPLE_OF_MULTIMODAL = (
    *("--vision-model-type", "siglip", "--freeze-ViT", "--img-h", "448", "--img-w", "448"),
    *("--patch-dim", "14", "--max-num-tiles", "6", "--use-thumbnail"),
)


def test_the_tower_of_megatrons_example_is_read_from_its_flags() -> None:
    words = launch()
    plan = plan_launch(
        LaunchRequest(replace(words, arguments=(*words.arguments, *EXAMPLE_OF_MULTIMODAL)))
    )
    tokens = 7 * (32 * 32 + 1)  # six tiles and a thumbnail, each with a class token
    told = f"frozen, its projector trained: {tokens:,} vision tokens a sample in 7 images"
    assert any(told in remark for remark in plan.remarks)
    without = made()
    assert own_of(plan).step > 1.1 * own_of(without).step


def test_a_tower_is_named_on_the_command_or_in_a_file_of_arguments() -> None:
    sizes = {"layers": 4, "hidden": 512, "heads": 8, "ffn": 2048}
    values = {
        **{k: v for k, v in FLAGS.items() if k != "num_virtual_stages_per_pipeline_rank"},
        **{"micro_batch_size": 1, "global_batch_size": 8, "train_iters": 1, "lr": 1e-3},
    }
    settings = {"vision": sizes, "vision_tokens": 2048}
    in_file = plan_launch(LaunchRequest(values=values | settings, world_size=2))
    text = ",".join(f"{name}={size}" for name, size in sizes.items())
    named = plan_launch(LaunchRequest(values=values, world_size=2, vision=f"{text},tokens=2048"))
    assert own_of(in_file).step == pytest.approx(own_of(named).step)
    fewer = plan_launch(LaunchRequest(values=values, world_size=2, vision=f"{text},tokens=256"))
    plain = plan_launch(LaunchRequest(values=values, world_size=2))
    assert own_of(named).step > own_of(fewer).step > own_of(plain).step


def test_ranks_are_as_slow_as_their_measured_speeds() -> None:
    even = made()
    slow = plan_launch(
        LaunchRequest(launch(), gpu=parse_gpu("h100"), seen_speeds=RankSpeeds((1.0, 0.5)))
    )
    assert own_of(slow).step > 1.5 * own_of(even).step
    assert any("taken as 1,0.5" in remark for remark in slow.remarks)
    assert "--pipeline-rank-speeds 1,0.5" in slow.command or slow.verdict.keeps
    with pytest.raises(ValueError, match="3 speeds for 2 pipeline ranks"):
        plan_launch(LaunchRequest(launch(), seen_speeds=RankSpeeds((1.0, 1.0, 1.0))))


def test_gpus_of_two_types() -> None:
    gpus = (GPUS["h100"], GPUS["a100"])
    mixed = plan_launch(LaunchRequest(launch(), gpu=GPUS["h100"], gpus=gpus))
    assert own_of(mixed).step > 1.5 * own_of(made()).step
    with pytest.raises(
        ValueError, match="--gpu names the GPUs of 3 pipeline ranks, and the launch has 2"
    ):
        plan_launch(LaunchRequest(launch(), gpu=GPUS["h100"], gpus=(*gpus, GPUS["a100"])))


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"num_layers": "x"}, "num_layers 'x' is not understood: invalid literal"),
        ({"num_layers": [1]}, "num_layers '[1]' is not understood: write a whole number"),
        ({"num_layers": 1.5}, "num_layers '1.5' is not understood: write a whole number"),
        ({"lr": True}, "lr 'True' is not understood: write a number"),
        ({"bf16": "yes"}, "bf16 'yes' is not understood: write true or false"),
        ({"num_layer": 3}, "Megatron has no argument num_layer: did you mean num_layers?"),
        ({"world_size": "8"}, "world_size '8' is not a number of ranks"),
        ({"world_size": -2}, "world_size '-2' is not a number of ranks"),
        ({"micro_batch_size": 3}, "batch"),
    ],
)
def test_a_mistake_in_a_file_of_arguments_names_the_file(
    values: dict[str, Any], why: str, tmp_path: Path
) -> None:
    """An error in a file of arguments names the file. Python's or Megatron's error used to be
    printed without that name."""
    right = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64}
    right |= {"micro_batch_size": 1, "global_batch_size": 8, "pipeline_model_parallel_size": 2}
    path = tmp_path / "model.json"
    path.write_text(json.dumps(right | values))
    ended = CliRunner().invoke(app, ["plan", str(path)])
    assert ended.exit_code == 2
    (line,) = ended.output.splitlines()
    assert line.startswith(f"megatron-ext: error: {path}: ") and why in line
