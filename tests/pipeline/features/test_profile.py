"""Tests of costs that a training measures itself (``--pipeline-costs profile``)."""

from __future__ import annotations

import json
import re
import tempfile
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from typer.testing import CliRunner

import megatron_ext
from megatron_ext.adapter import programs as programs_module
from megatron_ext.adapter.programs import Programs, StepKey
from megatron_ext.cli import app
from megatron_ext.compile.output_layer import place_output_layer
from megatron_ext.compile.program.graph import channels
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.registry import choose
from megatron_ext.config import PipelineConfig
from megatron_ext.cost_model.execution import Execution
from megatron_ext.cost_model.gpus import GPUS
from megatron_ext.cost_model.measured.layer_costs import Basis
from megatron_ext.cost_model.model import Model, stages_of
from megatron_ext.cost_model.operations.operation import Exchange, Group, Passes, linear
from megatron_ext.features.profile.adapter import step_profile as observer
from megatron_ext.features.profile.adapter.step_profile import costs_path
from megatron_ext.observe.trace import read_trace
from megatron_ext.patches import cpu
from megatron_ext.patches.engine import apply
from megatron_ext.runtime.held_bytes import Allocated, SavedTensors
from megatron_ext.runtime.measure import profile
from megatron_ext.runtime.measure.message_time import message_seconds
from megatron_ext.runtime.measure.profile import STEPS
from megatron_ext.runtime.recording import HostClock
from megatron_ext.runtime.store import leader
from megatron_ext.schedule.action import Kind, parse_action
from megatron_ext.schedule.costs import Costs, uniform
from megatron_ext.schedule.costs_text import load_costs, parse_costs
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.problem import P2P, Problem, Recompute, ScheduleOptions
from scripts.benchmarks import prediction
from scripts.benchmarks.emulated import in_seconds
from tests.helpers.combinations import at_night, nightly
from tests.helpers.held_bytes import measure_steps, read_steps
from tests.helpers.megatron_runs import (
    EXPERTS,
    SCRIPT,
    Run,
    assert_same,
    losses,
    model_flags,
    train,
)
from tests.helpers.ranks import run_ranks, values
from tests.helpers.stages import WIDTH, Pipeline, program_for, world
from tests.helpers.storages import LiveStorages
from tests.pipeline.callers import test_callers as callers
from tests.pipeline.features.test_trace import WRITERS

Flags = dict[str, object]

ITERATIONS = STEPS + 2
PASSES = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def run(ranks: int, flags: Flags, script: Path = SCRIPT) -> list[Run]:
    common: Flags = {"num_layers": 4, "train_iters": ITERATIONS, "global_batch_size": 4}
    return train(ranks, model_flags(**common | flags), script)


def profiled(path: Path, spec: str, ranks: int) -> Flags:
    return {
        "pipeline_model_parallel_size": ranks,
        "pipeline_schedule": spec,
        "pipeline_costs": f"profile:{path}",
    }


def costs_in(path: Path, spec: str, ranks: int) -> Costs:
    return load_costs(path, choose(spec).place(ranks))


# ---- measuring changes no number of the training


@pytest.mark.parametrize(
    ("spec", "ranks", "pipeline", "more"),
    [
        ("zb-auto", 2, 2, {"pipeline_memory_limit": "1x"}),
        ("zb-h1", 2, 2, {"pipeline_p2p": "batched", "eval_iters": 1, "eval_interval": 2}),
        # These cases run at night. By day, other tests of this file have a V with a split
        # vocabulary, and trace one of two pipelines.
        *at_night(
            ("1f1b", 2, 2, {}),
            ("zb-v", 4, 2, {}),
            ("zb-auto", 4, 2, {"tensor_model_parallel_size": 2, "pipeline_memory_limit": "1GiB"}),
            (
                "zb-h1",
                2,
                2,
                {
                    "attention_dropout": 0.1,
                    "recompute_granularity": "full",
                    "recompute_method": "uniform",
                    "recompute_num_layers": 1,
                },
            ),
            (
                "zb-h1",
                4,
                2,
                {
                    "bf16": True,
                    "use_distributed_optimizer": True,
                    "overlap_grad_reduce": True,
                    "overlap_param_gather": True,
                },
            ),
        ),
    ],
    ids=[
        *("zb-auto", "batched, evaluation"),
        *at_night("1f1b", "zb-v dp2"),
        *at_night("zb-auto tp2, bytes", "dropout, full recompute", "bf16, distributed optimizer"),
    ],
)
def test_a_training_that_measures_is_the_same_to_the_last_bit(
    spec: str,
    ranks: int,
    pipeline: int,
    more: Flags,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A training that measures its costs equals one that does not, to the last bit: stock's, or
    under a V the same V's. It logs the measured costs, what they change in the schedule, and how
    good the prediction was."""
    path = tmp_path / "new" / "costs.json"
    more = more | {"global_batch_size": 4 * ranks // pipeline}
    ours = {name: value for name, value in more.items() if name.startswith("pipeline")}
    theirs = {name: value for name, value in more.items() if name not in ours}
    if spec == "zb-v":  # without a checkpoint a V starts with other weights than stock
        theirs["pipeline_schedule"] = spec
    reference = run(ranks, {"pipeline_model_parallel_size": pipeline} | theirs)
    capfd.readouterr()
    runs = run(ranks, profiled(path, spec, pipeline) | more)
    assert len(losses(runs)) == ITERATIONS
    assert_same(runs, reference)
    said = [line for line in capfd.readouterr().out.splitlines() if "megatron_ext: " in line]
    (change,) = [line for line in said if "measured costs: " in line]
    assert re.search(
        rf"{spec}, measured costs: predicted [\d.]+% (faster|slower) than 1F1B, "
        rf"peak [\d.]+ microbatch(es)? "
        rf"\((was .* with estimated costs|as with estimated costs)\); costs written to {path}",
        change,
    )
    placement = choose(spec).place(pipeline)
    costs = costs_in(path, spec, pipeline)
    assert all(figure > 0 for figures in costs.seconds.values() for figure in figures)
    assert costs.links.p2p_seconds > 0
    assert costs.held_bytes is not None
    assert all(costs.held_bytes[Held.ACTIVATION][stage] > 0 for stage in range(placement.stages))
    predictions = [line for line in said if "step predicted" in line]
    assert len(predictions) == pipeline
    if spec in ("1f1b", "zb-h1"):  # the order of passes of these schedules does not depend on costs
        p2p = P2P(str(more.get("pipeline_p2p", P2P.ASYNC)))
        again = place_output_layer(
            choose(spec), Problem(placement, 4, costs, options=ScheduleOptions(p2p=p2p))
        )
        predicted = 1e3 * simulate(again, again.problem.costs).makespan
        said_so = re.search(r"step predicted ([\d.e+]+) ms", predictions[0])
        assert said_so and float(said_so[1]) == pytest.approx(predicted, rel=2e-3)
    for rank, line in enumerate(predictions):
        assert re.search(
            rf"pipeline rank {rank}: step predicted [\d.e+]+ ms, measured [\d.e+]+ ms "
            r"\([\d.]+% (shorter|longer)\); idle share predicted -?[\d.]+%, "
            r"measured -?[\d.]+%; median of 2 steps",
            line,
        )


def test_what_is_traced_is_what_was_requested(tmp_path: Path) -> None:
    """A trace of a run that measures costs holds exactly the requested iterations, although passes
    are marked in all of them.

    One of two pipelines is traced. That pipeline used to count its first iteration, which is not
    timed, as a timed one. It then waited for the other pipeline, which timed one more iteration.
    """
    path = tmp_path / "costs.json"
    traced: Flags = {"pipeline_trace": tmp_path, "pipeline_trace_iters": "1:3"}
    more: Flags = {"overlap_grad_reduce": True, "train_iters": STEPS + 1}
    run(4, profiled(path, "zb-v", 2) | traced | more)
    steps = read_trace(tmp_path)
    assert [step.iteration for step in steps] == [1, 2]
    assert [len(step.measured.reductions) for step in steps] == [4, 4]
    assert path.exists()


def test_the_commands_take_what_a_training_has_written(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    run(2, profiled(path, "zb-h1", 2) | {"train_iters": STEPS})
    for command in (["simulate", "zb-auto", "--pp", "2", "-m", "8"], ["plan", "pp=2,m=8"]):
        words = [*command, "--costs", str(path), "--json"]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)
    twice: Flags = {"train_iters": 2}
    runs = run(2, profiled(path, "zb-auto", 2) | {"pipeline_costs": path} | twice)
    assert_same(runs, run(2, {"pipeline_model_parallel_size": 2} | twice))


def test_a_divided_vocabulary_is_measured_too(tmp_path: Path) -> None:
    """A training with a vocabulary split over the ranks measures the costs of the vocabulary's
    passes."""
    path = tmp_path / "costs.json"
    divided: Flags = {"pipeline_vocab_parallel": "2", "train_iters": STEPS + 1}
    flags = profiled(path, "zb-v", 2) | divided
    runs = run(2, flags)
    assert losses(runs) == losses(run(2, flags | {"pipeline_costs": None}))
    costs = costs_in(path, "zb-v", 2)
    assert costs.vocabulary is not None
    assert all(costs.vocabulary.output_layer) and all(costs.vocabulary.embedding)
    assert "estimated" not in costs.origin


def test_layers_of_two_types_get_separate_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured costs separate two types of layers if stages mix them in different proportions. The
    test sets the seconds of passes, and the rest is a real training. Another schedule, with other
    stages, trains with the measured file."""
    path = tmp_path / "costs.json"
    mixtures, head = ("--", "-E", "EE", "EE"), 2.5e-3
    # Number of times that F, I and W of the last stage run the output layer. I runs it twice, as
    # the layer's W is fused into I.
    runs_of_head = dict(zip(PASSES, (1, 2, 0), strict=True))

    def takes(stage: int, kind: Kind) -> float:
        layers = sum({"-": 2e-3, "E": 5e-3}[layer] for layer in mixtures[stage])
        return layers + head * runs_of_head[kind] * (stage == 3)

    def medians(events: object) -> dict[tuple[int, Kind], float]:
        own = choose("zb-v").place(2).stages_of[dist.get_rank()]
        return {(stage, kind): takes(stage, kind) for stage in own for kind in PASSES}

    monkeypatch.setattr(profile, "medians", medians)
    experts: Flags = EXPERTS | {"num_layers": 8, "moe_layer_freq": "[0,0,0,1,1,1,1,1]"}
    run(2, profiled(path, "zb-v", 2) | experts | {"train_iters": STEPS})
    data = json.loads(path.read_text())
    layers, costs = data["layers"]["measured"], costs_in(path, "zb-v", 2)
    assert "machine" not in data, "without a GPU no operation is timed"
    assert data["layers"]["stages"] == [2, 2, 2, 2] and "within a node" in data["links"]
    for name, seconds in (("*-", 2e-3), ("*E", 5e-3), ("output layer", head)):
        assert layers[name]["f"] == pytest.approx(seconds, rel=1e-3)
    for kind in PASSES:
        for stage, mixture in enumerate(mixtures):
            names = [f"*{layer}" for layer in mixture] + ["output layer"] * (stage == 3)
            told = sum(layers[name][kind.value.lower()] for name in names)
            assert told == pytest.approx(costs.seconds[kind][stage], rel=1e-3)
    more = experts | {"pipeline_costs": path, "train_iters": 2}
    assert len(losses(run(2, profiled(path, "zb-h1", 2) | more))) == 2


@pytest.mark.parametrize(
    ("costs", "save", "trace", "path"),
    [
        ("profile", "checkpoints", "traces", "checkpoints/costs.json"),
        ("profile", "msc://bucket/checkpoints", "traces", "traces/costs.json"),
        ("profile", None, None, "costs.json"),
        ("profile:new/file", "checkpoints", "traces", "new/file"),
        ("estimate", "checkpoints", "traces", None),
    ],
)
def test_measured_costs_lie_with_the_checkpoints(
    costs: str, save: str | None, trace: str | None, path: str | None
) -> None:
    """The file of measured costs is written to the folder of checkpoints if no path is given. It
    used to be written to the working directory, where two jobs wrote one file."""
    config = PipelineConfig.parse(schedule="zb-h1", costs=costs, trace=trace)
    found = costs_path(config, Namespace(save=save))
    assert found == (None if path is None else Path(path))


# ---- the end of a training that measures costs


def test_a_training_that_ends_early_compares_too(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A training that ends early by --exit-interval, after which Megatron exits, still compares its
    steps with the prediction. No path of the costs file is given, so the file is in the folder of
    the trace."""
    in_trace = {"pipeline_costs": "profile", "pipeline_trace": tmp_path}
    flags = profiled(tmp_path, "zb-h1", 2) | in_trace
    run(2, flags | {"exit_interval": STEPS + 1, "pipeline_trace_iters": "2:3"})
    out = capfd.readouterr().out
    assert f"in iterations 2 to {STEPS}, and written to {tmp_path}/costs.json" in out
    assert costs_in(tmp_path / "costs.json", "zb-h1", 2).links.p2p_seconds > 0
    assert out.count("step predicted") == 2 and "median of 1 step" in out


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"train_iters": STEPS}, "no iteration has run with the measured costs"),
        ({"exit_interval": 2}, f"the training has had 2 of {STEPS} iterations"),
    ],
)
def test_a_training_too_short_to_compare_says_so(
    flags: Flags, why: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run(2, profiled(tmp_path / "costs.json", "zb-h1", 2) | flags)
    out = capfd.readouterr().out
    assert "nothing to compare with the prediction" in out and why in out


@nightly("test_trace.py and test_metrics.py have these writers")
def test_megatrons_own_writers_get_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(WRITERS.replace("{script!r}", repr(str(SCRIPT))))
    monkeypatch.setenv("WRITTEN", str(tmp_path))
    run(4, profiled(tmp_path / "costs.json", "zb-v", 2), script)
    for name in ("tensorboard", "wandb"):
        lines = map(json.loads, (tmp_path / f"{name}-3").read_text().splitlines())
        written = {what: (value, at) for what, value, at in lines if what.startswith("pipeline/")}
        assert written.keys() == {
            *("pipeline/bubble share", "pipeline/bubble share, predicted"),
            *("pipeline/step seconds", "pipeline/step seconds, predicted"),
        }
        assert {at for _, at in written.values()} == {ITERATIONS}
        assert written["pipeline/step seconds"][0] > 0


# ---- measuring in a caller's own loop


def test_other_shapes_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Costs are measured once for each shape of microbatches. The costs of one shape stay known
    when another shape comes."""
    path = tmp_path / "costs.json"

    def loop(rank: int) -> list[str]:
        with apply(cpu.patches()):
            parallel_state.initialize_model_parallel(pipeline_model_parallel_size=callers.RANKS)
            model_parallel_cuda_manual_seed(0)
            origins = []
            with megatron_ext.install(schedule="zb-h1", costs=f"profile:{path}"):
                for batch in (2, 3, 2):
                    monkeypatch.setattr(callers, "BATCH", batch)
                    for _ in range(STEPS + 1):
                        callers.step(own_groups=False, microbatches=2)
                    dist.barrier()
                    origins.append(costs_in(path, "zb-h1", callers.RANKS).origin)
            return origins

    first, second, third = values(run_ranks(callers.RANKS, loop))[0]
    assert "micro batch 2, sequence 8" in first
    assert "micro batch 3, sequence 8" in second == third
    assert capfd.readouterr().out.count("measured costs: ") == 2


def test_a_shape_that_another_pipeline_meets_first_is_estimated_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pipeline whose sequences have a length that global rank 0 has not met estimates costs by
    its own sizes. Such a pipeline used to take global rank 0's costs in its first step. Rank 0,
    which writes the costs file, did not know how the other pipeline's costs were estimated, so the
    file had no costs by layer type."""
    monkeypatch.setattr(leader, "AHEAD_SECONDS", 0.1)
    estimate = {length: uniform(choose("1f1b").place(1), length, 1, 1) for length in (8, 16)}

    def on_rank(rank: int) -> tuple[dict[Any, Costs], dict[Any, Any]]:
        # The two ranks form two pipelines of one rank each.
        groups: list[Any] = [dist.new_group([0]), dist.new_group([1])]
        # A job is described by its sequence length only.
        monkeypatch.setattr(
            programs_module, "of_built", lambda config, placement, sizes, length, *more: length
        )
        monkeypatch.setattr(programs_module, "basis_of", lambda length: f"of {length}")
        monkeypatch.setattr(
            programs_module, "job_costs", lambda source, length, *more: estimate[length]
        )
        programs = Programs(
            PipelineConfig.parse(schedule="1f1b", costs="profile:costs.json"), lambda *_: {}
        )
        models: list[torch.nn.Module] = [torch.nn.Linear(1, 1)]
        monkeypatch.setattr(programs_module, "chunk_size", str)
        lengths = (16,) if rank else (8, 16)
        for length in lengths:
            programs.agree_on_costs(
                groups[rank],
                None,
                models,
                (1, length),
                sequence=length,
                micro_batch=1,
                microbatches=4,
                forward_only=False,
            )
            if length == lengths[0]:
                key = StepKey("1f1b", (1, length), 4, False, 0, False)
                programs._compare(f"program for {length}", key, groups[rank])
                dist.barrier()
        return programs.costs, programs.bases

    (costs, bases), (others, none) = values(run_ranks(2, on_rank))
    assert costs == others == {(1, length): estimate[length] for length in (8, 16)}
    assert bases == {(1, 8): "of 8", (1, 16): "of 16"} and not none


def test_a_limit_that_measured_bytes_exceed_ends_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training ends if its measured bytes exceed the memory limit, although the estimate was
    within it. The costs file is still written, so that the user can plan with it."""
    path = tmp_path / "costs.json"
    monkeypatch.setattr(
        SavedTensors,
        "per_microbatch",
        lambda self, **given: {(s, k): 2.0**40 for s in range(4) for k in Held},
    )

    def loop(rank: int) -> str:
        with apply(cpu.patches()):
            parallel_state.initialize_model_parallel(pipeline_model_parallel_size=callers.RANKS)
            model_parallel_cuda_manual_seed(0)
            costs = f"profile:{path}"
            with megatron_ext.install(schedule="zb-h1", memory_limit="1GiB", costs=costs):
                for _ in range(STEPS - 1):
                    callers.step(own_groups=False, microbatches=2)
                with pytest.raises(ValueError, match="over the memory limit of 1GiB") as caught:
                    callers.step(own_groups=False, microbatches=2)
            return "\n".join(caught.value.__notes__)

    notes = values(run_ranks(callers.RANKS, loop))
    assert all(f"measured, which are in {path}" in note for note in notes)
    assert path.exists()


def test_a_file_that_cannot_be_written_does_not_end_the_training(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.mkdir()

    def loop(rank: int) -> None:
        with apply(cpu.patches()):
            parallel_state.initialize_model_parallel(pipeline_model_parallel_size=callers.RANKS)
            model_parallel_cuda_manual_seed(0)
            with megatron_ext.install(schedule="zb-h1", costs=f"profile:{path}"):
                for _ in range(STEPS + 1):
                    callers.step(own_groups=False, microbatches=2)

    results = run_ranks(callers.RANKS, loop)
    values(results)
    assert "costs are not written" in results[0].stderr


# ---- measured operations and bytes


def test_operations_are_timed_for_a_known_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Single operations are timed only on a GPU whose data sheet is known. On the emulated GPU,
    matrix products take three times the estimate, gathers take twice the estimate, and products of
    experts cannot be timed."""
    model = Model(
        layers=("*-",) * 2,
        hidden_size=1024,
        num_attention_heads=8,
        num_query_groups=8,
        kv_channels=128,
        ffn_hidden_size=4096,
        vocabulary=0,
    )
    sheet, run = GPUS["h100"].rates(), Execution(1024, tensor_parallel=2)
    basis = Basis(model, stages_of(model, [1, 1]), run, sheet)
    monkeypatch.setattr(observer, "_is_on_gpu", lambda: False)
    assert observer._machine_factors(basis, {}) is None
    monkeypatch.setattr(observer, "_is_on_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(observer, "machine_versions", lambda: ("torch 2.11.0",))

    def seconds(shape: tuple[float, float, float], *, in_fp8: bool) -> float:
        assert not in_fp8
        rows, columns, depth = shape
        product, *_ = linear("product", rows, depth, columns, run)
        return 3 * sheet.seconds_of(product)[0]

    monkeypatch.setattr(observer, "product_seconds", seconds)
    gather = Exchange(Group.TENSOR, 2, 1, Passes(2.0**20, 0.0))
    gathers = {Group.TENSOR: {2.0**20: 2 * sheet.seconds_to_exchange(gather)[0]}}
    monkeypatch.setattr(observer, "attention_seconds", lambda shape: (shape[2], 1.0))
    monkeypatch.setattr(observer, "grouped_seconds", lambda shape: None)
    factors = observer._machine_factors(basis, gathers)
    assert factors is not None
    assert (factors.gpu, factors.precision) == ("NVIDIA H100 80GB HBM3", "bf16")
    assert factors.of_product((1024, 3072, 1024)) == pytest.approx(3)
    assert factors.of_gather(2**20) == pytest.approx(2)
    assert [timed.measured for timed in factors.attention] == [8, 4, 2, 1], "heads of a rank"
    assert not factors.grouped and not factors.exchanges
    for dispatcher, exchanges in (("alltoall", 1), ("flex", 0)):
        with_experts = replace(run, expert_parallel=2, dispatcher=dispatcher)
        found = observer._machine_factors(
            replace(basis, execution=with_experts), {Group.EXPERT: {2.0**20: 1.0}}
        )
        assert found is not None and len(found.exchanges) == exchanges and not found.gathers
    monkeypatch.setattr(observer, "product_seconds", lambda shape, **_: None)
    without_memory = observer._machine_factors(basis, gathers)
    assert without_memory is not None and not without_memory.products
    unknown = replace(basis, rates=replace(sheet, sms=0))
    assert observer._machine_factors(unknown, gathers) is None, "the estimate knows no shapes"


MODEL: Flags = {
    "num_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "rerun_mode": "disabled",
}


@pytest.mark.parametrize(
    ("spec", "output_layer_waits"), [("zb-v", False), *at_night(("zb-h1", True))]
)
def test_bytes_are_those_that_ranks_hold(
    spec: str, output_layer_waits: bool, tmp_path: Path
) -> None:
    """The bytes in the costs file equal those that hooks on autograd and on the queue of weight
    gradients count (`held_bytes`).

    If the output layer's weight gradient was computed in I, the file adds the bytes that would be
    stored until W.
    """
    path = tmp_path / "costs.json"
    run(2, MODEL | profiled(path, spec, 2) | {"train_iters": STEPS})
    costs = costs_in(path, spec, 2)
    assert costs.held_bytes is not None and costs.vocabulary is not None
    counted = counted_bytes(spec)
    stages = choose(spec).place(2).stages
    for stage in range(stages):
        inputs = counted[f"{stage}I0"]
        if stage == stages - 1 and not output_layer_waits:
            inputs += round(costs.vocabulary.deferred_bytes)
        activation = costs.held_bytes[Held.ACTIVATION][stage]
        assert activation == pytest.approx(counted[f"{stage}F0"], rel=0.01)
        assert costs.held_bytes[Held.WEIGHT_INPUTS][stage] == pytest.approx(inputs, rel=0.01)


def counted_bytes(spec: str) -> dict[str, int]:
    """Return the bytes that microbatch 0 stores after F and after I, by the action."""
    more: Flags = {"pipeline_model_parallel_size": 2, "pipeline_schedule": spec}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
        measure_steps(monkeypatch, Path(folder))
        run(2, MODEL | more | {"train_iters": 2})
        ranks = read_steps(Path(folder), 2)
    return {str(sample.action): sample.own for rank in ranks for sample in rank.samples}


@pytest.mark.parametrize(("microbatches", "tensors"), [(2, 2), (1, 3)])
def test_saved_tensors_are_counted_once_and_without_what_microbatches_share(
    microbatches: int, tensors: int
) -> None:
    """Each saved tensor counts once, and tensors that microbatches share do not count. With a
    single microbatch shared tensors cannot be recognized: a mask counts, a parameter does not."""
    weight = torch.nn.Parameter(torch.ones(100, 100))
    mask = torch.ones(100)
    counting = SavedTensors([weight])
    for microbatch in range(microbatches):
        x = torch.ones(100, requires_grad=True)
        with counting.around(parse_action(f"0F{microbatch}")):
            y = (weight @ x * mask).exp()  # autograd saves x, mask and the result of exp
            z = (y[:50] * y[50:]).sum()  # autograd saves two parts of y
        z.backward()
    assert counting.per_microbatch() == {(0, Held.ACTIVATION): tensors * 400}


def test_the_largest_microbatch_counts_where_they_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of the largest microbatch count if microbatches differ in size. The first
    microbatch never counts, however large, because caches fill in it."""
    saved, allocated, now = SavedTensors([]), Allocated(1, 0), [0]
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: now[0])
    for microbatch, size in enumerate((900, 100, 100, 300)):
        x = torch.ones(size, requires_grad=True)
        with (
            saved.around(parse_action(f"0F{microbatch}")),
            allocated.around(parse_action(f"0F{microbatch}")),
        ):
            y = x.exp()
            now[0] += y.nbytes
        y.sum().backward()
    for counting in (saved, allocated):
        assert counting.per_microbatch() == {(0, Held.ACTIVATION): 800}
        assert counting.per_microbatch(largest=True) == {(0, Held.ACTIVATION): 1200}


@pytest.mark.parametrize("again", [Recompute(first=2), *at_night(Recompute())], ids=str)
def test_an_allocator_counts_the_same_bytes(
    again: Recompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The byte count by an allocator, as on a GPU, gives the expected tensors of a known model, ``y
    = tanh(x) W^T + b`` with a loss. Live storages stand in for the allocator. If a pass is
    recomputed, its second run counts."""
    tensor = 3 * WIDTH * 4

    def counted(rank: int) -> dict[tuple[int, Held], float]:
        pipeline = Pipeline(program_for(choose("zb-h1"), 2, 5, recompute=again), world())
        pipeline.step()
        counting = pipeline.recorder.counting = Allocated(2, tensor)
        with LiveStorages() as live:
            monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: sum(live.sizes().values()))
            pipeline.step()
        return counting.per_microbatch()

    first, last = values(run_ranks(2, counted))
    # Stored until I: x and tanh(x), and 4 bytes that remain of a freed output. Stored until W:
    # tanh(x) and dy.
    assert first[0, Held.ACTIVATION] == pytest.approx(2 * tensor, abs=4)
    assert first[0, Held.WEIGHT_INPUTS] == 2 * tensor
    # Stored until I: x, tanh(x) and the y of the loss.
    assert last[1, Held.ACTIVATION] == pytest.approx(3 * tensor, abs=16)
    assert last[1, Held.WEIGHT_INPUTS] == 2 * tensor


@pytest.mark.parametrize("p2p", P2P)
@pytest.mark.parametrize("spec", ["zb-h1", "zb-v", "interleaved"])
def test_messages_are_timed_between_all_neighbours(spec: str, p2p: P2P) -> None:
    """The seconds of messages are measured between all neighbours, once for each link, by its lower
    rank. Steps run before and after the measurement."""

    def timed(rank: int) -> int:
        program = program_for(choose(spec), 3, 6, p2p=p2p)
        pipeline = Pipeline(program, world())
        pipeline.step()
        ways = channels(program.schedule)
        seconds = message_seconds(pipeline.connection, ways, (3, 8), torch.float32, HostClock())
        pipeline.step()
        assert all(duration > 0 for duration in seconds.values())
        return len(seconds)

    expected = [2, 1, 0] if spec == "interleaved" else [1, 1, 0]
    assert values(run_ranks(3, timed)) == expected


# ---- prediction on emulated clocks


@pytest.mark.parametrize("spec", ["1f1b", "zb-auto", "zb-v"])
def test_the_measured_costs_are_those_of_the_passes(spec: str) -> None:
    """Measured costs are at least the seconds that emulated passes sleep, because a sleep never
    ends early. (A benchmark measures how well steps are predicted.)"""
    result = prediction.measure(spec, 2, 4, "f=6,i=8,w=4")
    placement = choose(spec).place(2)
    asked = in_seconds("f=6,i=8,w=4", placement)
    measured = parse_costs(result.measured, placement)
    least = 0.999  # printed numbers are rounded
    for stage in range(placement.stages):
        assert measured.seconds[Kind.FORWARD][stage] > least * asked.seconds[Kind.FORWARD][stage]
        backward = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        assert sum(measured.seconds[kind][stage] for kind in backward) > least * sum(
            asked.seconds[kind][stage] for kind in backward
        )
    for busy in (result.comparison.predicted_busy, result.comparison.measured_busy):
        assert all(seconds > least * 4 * 18e-3 for seconds in busy)
    assert result.comparison.measured > max(result.comparison.measured_busy)
    assert result.comparison.steps == 5
