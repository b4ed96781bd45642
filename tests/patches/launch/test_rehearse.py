"""Tests of `megatron-ext rehearse`: it prepares a launch command, runs its ranks one by one, and
reports.

A stand-in runs the ranks here, and records the passes of the launch command's own program.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from megatron_ext.cli import app
from megatron_ext.commands.rehearse import write_composed_steps
from megatron_ext.compile.program.verify import Program
from megatron_ext.cost_model.measured.file import load_measured
from megatron_ext.launch.command.launch_words import read_launch
from megatron_ext.launch.planner.parsed_launch import LaunchRequest
from megatron_ext.observe.trace import read_trace
from megatron_ext.observe.trace_report import trace_report
from megatron_ext.rehearsal import rehearse as module
from megatron_ext.rehearsal.gpu_here import GpuHere
from megatron_ext.rehearsal.prepare import Preparation, prepare, schedules_of
from megatron_ext.rehearsal.processes import RunsRanks
from megatron_ext.rehearsal.record import RankRecord, RehearsedPass, RehearsedStep
from megatron_ext.rehearsal.rehearsal_report import RehearsalReport, not_rehearsed
from megatron_ext.rehearsal.rehearse import RehearsalRequest, rehearse
from megatron_ext.rehearsal.request import PeerValues, RankRequest
from megatron_ext.schedule.action import Action
from megatron_ext.schedule.schedule import is_compute
from tests.helpers.combinations import nightly
from tests.helpers.few_families import only_families
from tests.helpers.megatron_runs import SCRIPT, model_flags
from tests.helpers.short_search import shorten_search

FLAGS: dict[str, Any] = {
    "pipeline_model_parallel_size": 4,
    "num_layers": 8,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "seq_length": 2048,
    "max_position_embeddings": 2048,
    "micro_batch_size": 1,
    "global_batch_size": 8,
    "bf16": True,
    "transformer_impl": "local",
}
OUTSIDE, BETWEEN = 0.05, 1e-4  # seconds outside the passes, and between two passes
FACTOR = 1.1  # seconds of the stand-in's passes, as a multiple of the estimate


@pytest.fixture(autouse=True)
def login_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def words(ranks: int = 4, **overrides: object) -> list[str]:
    flags = model_flags(**{**FLAGS, **overrides})
    return ["torchrun", "--nproc-per-node", str(ranks), str(SCRIPT), *flags]


def prepared(tmp_path: Path, schedules: str, ranks: int = 4, **overrides: object) -> Preparation:
    request = LaunchRequest(read_launch(words(ranks, **overrides)))
    return prepare(request, schedules_of(schedules), tmp_path)


def seconds(program: Program, action: Action) -> float:
    """Return the seconds that the stand-in gives a pass: 10 % more than estimated, and +-5 % by
    microbatch."""
    return program.problem.costs.of(action) * (FACTOR + 0.1 * (action.microbatch % 3 - 1) / 2)


@dataclass
class StandIn:
    """Stand-in that runs ranks by the programs of ``known``, and keeps the requests."""

    known: Mapping[str, Program]
    stride: int
    requests: list[RankRequest]
    environment: dict[str, str] = field(default_factory=dict)
    change: Callable[[RankRecord], RankRecord] = lambda record: record

    def __call__(self, request: RankRequest) -> RankRecord:
        self.requests.append(request)
        program = self.known[request.folder.parent.name]
        rank = request.rank // self.stride
        step = RehearsedStep(tuple(self._passes(program, rank)), 0.0)
        step = replace(step, seconds=step.passes[-1].end - step.passes[0].start + OUTSIDE)
        is_ours = "--pipeline-schedule" in request.arguments
        record = RankRecord(
            rank=request.rank,
            world_size=request.world_size,
            pipeline_rank=rank,
            schedule=program.schedule.name,
            digest=program.digest if is_ours else "",
            trained=request.warm_up + request.steps,
            steps=(step,) * request.steps,
            allocated=3 << 30,
            reserved=4 << 30,
        )
        return self.change(record)

    @staticmethod
    def _passes(program: Program, rank: int) -> Iterator[RehearsedPass]:
        now = 0.0
        for action in filter(is_compute, program.schedule.rows[rank]):
            yield RehearsedPass(action, now, now + seconds(program, action))
            now += seconds(program, action) + BETWEEN

    @contextlib.contextmanager
    def start(self, environment: Mapping[str, str], log: Path) -> Iterator[RunsRanks]:
        self.environment.update(environment)
        yield self


def stand_in(tmp_path: Path, schedules: str, ranks: int = 4, **overrides: object) -> StandIn:
    made = prepared(tmp_path / "known", schedules, ranks, **overrides)
    programs = {one.name: one.program for one in made.schedules}
    return StandIn(programs, made.stride, [])


def request(tmp_path: Path, schedules: str, ranks: int = 4, **overrides: object) -> Any:
    launch = read_launch(words(ranks, **overrides))
    return RehearsalRequest(launch, schedules_of(schedules), tmp_path, is_cpu=True)


def rehearsed(
    tmp_path: Path, schedules: str, ranks: int = 4, **overrides: object
) -> tuple[RehearsalReport, StandIn, list[str]]:
    run, told = stand_in(tmp_path, schedules, ranks, **overrides), list[str]()
    report = rehearse(request(tmp_path, schedules, ranks, **overrides), run.start, told.append)
    return report, run, told


def test_a_launch_command_is_rehearsed(tmp_path: Path) -> None:
    report, run, told = rehearsed(tmp_path, "stock zb-h1 zb-v", 8, global_batch_size=16)
    assert told == [
        "8 of 12 ranks run alone on the CPU, one after another: about 1 min 32 s to start them, "
        "and their steps at the CPU's speed"
    ]
    stock, zb_h1, zb_v = report.schedules
    assert [one.schedule for one in report.schedules] == ["1f1b", "zb-h1", "zb-v"]
    assert stock.of_first == 1 and zb_h1.seconds < stock.seconds and zb_v.of_first < 1
    assert stock.seconds == pytest.approx(stock.passes + OUTSIDE)
    for one in report.schedules:  # the stand-in's passes take 1.05 to 1.15 of the estimated seconds
        assert 1.0 < one.passes / (one.estimate.seconds - one.estimate.messages) < 1.2
        assert one.estimate.reductions > 0  # two replicas reduce gradients
    # One of several pipeline ranks with equal stages runs, and only ranks of the first replica run.
    assert [(r.folder.parent.name, r.rank) for r in run.requests] == [
        *(("stock", 2), ("stock", 0), ("stock", 6)),
        *(("zb-h1", 2), ("zb-h1", 0), ("zb-h1", 6)),
        *(("zb-v", 2), ("zb-v", 6)),
    ]
    assert [one.stands_for for one in report.ranks[:3]] == [(1, 2), (0,), (3,)]
    assert all(one.trained == 5 and one.allocated == 3 << 30 for one in report.ranks)


def test_ranks_run_once_more_with_their_messages_on_time(tmp_path: Path) -> None:
    run, told = stand_in(tmp_path, "stock zb-v"), list[str]()
    own = replace(request(tmp_path, "stock zb-v"), replays=True)
    report = rehearse(own, run.start, told.append)
    assert "one after another, and once more with their messages on time: about" in told[0]
    folders = [asked.folder.name for asked in run.requests]
    assert folders[:6] == ["rank1", "rank0", "rank3", *(f"rank{n}-replayed" for n in (1, 0, 3))]
    assert [one.is_replay for one in report.ranks] == [name.endswith("d") for name in folders]
    for alone, again in zip(run.requests[:3], run.requests[3:6], strict=True):
        assert again.replay is not None
        assert replace(again, replay=None, folder=alone.folder) == alone
        # All messages stay within a node, and those over NVLink have 32 CTAs.
        assert (again.replay.ctas, again.replay.has_blocks) == (32, True)
        assert {len(times) for times in again.replay.moved.values()} == {8}
    for one, figures in zip(report.replays, report.schedules, strict=True):
        assert one.figures.name == figures.name
        assert one.over_alone == pytest.approx(1)  # the stand-in runs the same passes in a replay
        assert 0.05 < one.off_end < 1  # the stand-in does not wait for messages
        assert Path(one.figures.costs).exists() and Path(one.figures.trace).exists()
    assert not any("there at once" in text for text in report.not_rehearsed)


def test_a_replay_without_blocks_says_so(tmp_path: Path) -> None:
    own = replace(request(tmp_path, "stock"), replays=True, has_blocks=False)
    for asked, told in (
        (own, "--without-blocks: with --cpu there are no thread blocks"),
        (replace(own, replays=False), "--without-blocks: only in a replay do messages wait"),
    ):
        with pytest.raises(ValueError, match=told):
            rehearse(asked, stand_in(tmp_path, "stock").start, print)
    made = prepared(tmp_path, "stock")
    lines = [
        list(not_rehearsed(made, is_cpu=False, replays=True, has_blocks=has_blocks, imbalance=None))
        for has_blocks in (True, False)
    ]
    assert [any("receives occupy" in text for text in of) for of in lines] == [False, True]


def test_reductions_that_overlap_passes_are_estimated_as_plan_does(tmp_path: Path) -> None:
    """`rehearse` estimates gradient reductions that overlap with passes as `plan` does. That
    estimate needs the passes that hide the reductions, and without them the command used to end in
    an AssertionError."""
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    settings = {"use_distributed_optimizer": True, "global_batch_size": 16}
    (bare,) = prepared(tmp_path, "stock", 8, **settings).schedules
    (hidden,) = prepared(tmp_path, "stock", 8, **settings, **overlap).schedules
    assert 0 < hidden.estimate.reductions < bare.estimate.reductions


def test_programs_and_costs_travel_as_files(tmp_path: Path) -> None:
    _, run, _ = rehearsed(tmp_path, "stock zb-v", load="there", data_path="text", mock_data=False)
    middle, first, last, *ours = run.requests
    assert "--pipeline-costs" not in middle.arguments
    for own in ours:
        assert own.arguments[-2:] == ("--pipeline-costs", str(tmp_path / "zb-v" / "estimate.json"))
    for own in run.requests:
        given = own.arguments
        assert "--mock-data" in given
        assert "--load" not in given and "--data-path" not in given
    # The first and the last rank of a linear placement send in one direction only; the sizes for
    # the other direction are those that the middle rank sent.
    assert middle.neighbour is None
    assert first.neighbour == last.neighbour == middle.folder / "record.json"


def test_ranks_import_what_the_command_was_judged_by(tmp_path: Path) -> None:
    """Rehearsed ranks import the Megatron by which the command was checked. The command used to be
    checked with the checkout in the script's folder, and the ranks ran an installed wheel."""
    run = stand_in(tmp_path, "stock")
    own = request(tmp_path, "stock")
    launch = replace(own.launch, environment={"PYTHONPATH": "more"})
    rehearse(replace(own, launch=launch), run.start, print)
    assert run.environment["PYTHONPATH"] == f"{SCRIPT.parent}{os.pathsep}more"
    rehearse(replace(own, launch=replace(launch, installs=True)), run.start, print)
    assert run.environment["PYTHONPATH"] == "more"


@pytest.mark.parametrize(
    "options", [{}, {"pipeline_schedule": "zb-h1", "pipeline_vocab_parallel": 1}], ids=str
)
def test_what_a_search_has_found_travels_as_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Rehearsed ranks read the schedule that the search found from a file. Each rank used to repeat
    the search, which took as long as the command's own."""
    shorten_search(monkeypatch)
    options = {"vocab_size": 4096, **options}
    made = prepared(tmp_path, "zb-auto v-auto", **options).schedules
    for one in made:
        file = tmp_path / one.name / "schedule.csv"
        assert one.arguments[-2:] == ("--pipeline-schedule", str(file))
        assert one.arguments.count("--pipeline-schedule") == 1
        (table,) = prepared(tmp_path, str(file), **options).schedules
        assert table.program.digest == one.program.digest
    assert len({one.program.digest for one in made}) == 2


def test_a_schedule_has_the_chunks_of_the_launch_command(tmp_path: Path) -> None:
    """A rehearsed schedule has as many chunks a rank as the launch command, if its family allows.
    Costs for four chunks a rank used to be given to a schedule with two, and refused."""
    made = prepared(
        *(tmp_path, "stock interleaved-zb"), num_layers=16, num_virtual_stages_per_pipeline_rank=4
    )
    assert [one.spec for one in made.schedules] == ["interleaved:vpp=4", "interleaved-zb:vpp=4"]
    assert {one.program.schedule.placement.chunks for one in made.schedules} == {4}


def test_variables_in_place_of_flags_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`rehearse` refuses our environment variables and says which flags to write. The rehearsed
    ranks used to read these variables, also for stock's schedule, while the command itself ignored
    them."""
    # MEGATRON_EXT_ALLOW_UNKNOWN is no setting of a schedule.
    monkeypatch.setenv("MEGATRON_EXT_ALLOW_UNKNOWN", "1")
    run = stand_in(tmp_path, "stock")
    own = request(tmp_path, "stock")
    rehearse(own, run.start, print)
    launch = replace(own.launch, environment={"MEGATRON_EXT_SCHEDULE": "zb-v"})
    words = "MEGATRON_EXT_SCHEDULE is set.* unset it, and write --pipeline-schedule zb-v behind"
    with pytest.raises(ValueError, match=words):
        rehearse(replace(own, launch=launch), run.start, print)


@nightly("the next test loads such a file, and test_launch_job.py plans by one")
def test_the_costs_file_is_a_profile_of_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_families(monkeypatch, "1f1b", "zb-h1")
    report, _, _ = rehearsed(tmp_path, "zb-h1")
    file = Path(report.schedules[0].costs)
    measured = load_measured(file)
    assert measured is not None
    scales = measured.rates.measured
    assert scales is not None
    layer = dict(scales.scales)["*-"]
    assert layer.forward == pytest.approx(FACTOR, abs=0.02)
    assert layer.weight_gradient == pytest.approx(FACTOR, abs=0.02)
    given = ["--costs", str(file), "--gpu", "h100", "--json"]
    planned = CliRunner().invoke(app, ["plan", *given, "--", *words()])
    assert planned.exit_code == 0, planned.output
    assert str(file) in planned.output
    # The stand-in's allocator reserved 4 GiB and allocated 3 GiB.
    free = json.loads(planned.stdout)["free"]
    assert (free["reserved"], free["is_modelled"]) == (1 << 30, False)


def test_options_of_a_schedule_are_those_of_the_launch_command(tmp_path: Path) -> None:
    """A rehearsed schedule has the options of the launch command, such as a split vocabulary. With
    a split vocabulary the writing of the costs file used to end in an assertion."""
    options: dict[str, Any] = {
        "pipeline_schedule": "zb-h1",
        "pipeline_vocab_parallel": 1,
        "vocab_size": 4096,
    }
    report, run, _ = rehearsed(tmp_path, "stock zb-v", **options)
    assert "--pipeline-vocab-parallel" not in run.requests[0].arguments
    given = run.requests[-1].arguments
    assert given[given.index("--pipeline-vocab-parallel") + 1] == "1"
    assert given[given.index("--pipeline-schedule") + 1] == "zb-v"
    assert set(report.ranks[-1].seconds) == {"F", "I", "W", "S", "SI", "SW", "L", "E", "EW"}
    measured = load_measured(Path(report.schedules[1].costs))
    assert measured is not None


def test_the_trace_of_the_composed_step_can_be_explained(tmp_path: Path) -> None:
    report, _, _ = rehearsed(tmp_path, "stock zb-v")
    for one in report.schedules:
        steps = read_trace(Path(one.trace))
        explained = trace_report(steps)
        assert explained.measured.makespan == pytest.approx(one.passes)
        assert explained.cost_factor == pytest.approx(FACTOR, abs=0.05)
    assert trace_report(read_trace(Path(report.schedules[0].trace))).what_if is not None
    page = tmp_path / "page.html"
    write_composed_steps(report, page)
    text = page.read_text()
    assert "stock, rehearsed" in text and "zb-v, rehearsed" in text and report.facts in text


def test_experts_are_balanced_unless_the_command_says_otherwise(tmp_path: Path) -> None:
    experts: dict[str, Any] = {
        "num_experts": 4,
        "expert_model_parallel_size": 2,
        "moe_token_dispatcher_type": "alltoall",
        "disable_bias_linear": True,
    }
    report, run, _ = rehearsed(tmp_path, "zb-h1", 8, **experts, global_batch_size=16)
    assert "--moe-router-force-load-balancing" in run.requests[0].arguments
    assert any("balance of experts" in text for text in report.not_rehearsed)
    assert report.schedules[0].estimate.waiting["expert-parallel"] > 0
    biased = {"moe_router_force_biased": 0.5}
    report, run, _ = rehearsed(tmp_path, "zb-h1", 8, **experts, **biased, global_batch_size=16)
    assert "--moe-router-force-load-balancing" not in run.requests[0].arguments
    assert not any("balance of experts" in text for text in report.not_rehearsed)


def test_experts_are_unbalanced_by_megatrons_biased_router(tmp_path: Path) -> None:
    experts: dict[str, Any] = {"num_experts": 4, "disable_bias_linear": True}
    run = stand_in(tmp_path, "zb-h1", **experts)
    own = replace(request(tmp_path, "zb-h1", **experts), imbalance=0.5)
    report = rehearse(own, run.start, print)
    given = run.requests[0].arguments
    assert given[given.index("--moe-router-force-biased") + 1] == "0.5"
    assert "--moe-router-force-load-balancing" not in given
    assert any("standard deviation is 0.5" in text for text in report.not_rehearsed)
    for overrides, told in (
        ({}, "--imbalance 0.5: the model has no experts; drop --imbalance"),
        (
            {**experts, "moe_router_force_biased": 1.0},
            "--imbalance 0.5: the launch command already has --moe-router-force-biased; drop one",
        ),
    ):
        with pytest.raises(ValueError, match=told):
            rehearse(
                replace(request(tmp_path, "zb-h1", **overrides), imbalance=0.5), run.start, print
            )


def test_real_values_go_from_class_to_class(tmp_path: Path) -> None:
    """With real values, a rehearsed rank receives what another rank has sent in its own rehearsal,
    so the ranks of the first stages are rehearsed first. In a replay the order is free, because all
    neighbours have run before."""
    run = stand_in(tmp_path, "stock zb-v")
    own = replace(request(tmp_path, "stock zb-v"), values=PeerValues.REAL, replays=True)
    report = rehearse(own, run.start, print)
    got = [
        (one.folder.parent.name, one.rank, {n: f.parent.name for n, f in one.received.items()})
        for one in run.requests
    ]
    assert got == [
        ("stock", 0, {}),
        ("stock", 1, {"forward": "rank0"}),
        ("stock", 3, {"forward": "rank1"}),
        ("stock", 0, {"backward": "rank1"}),
        ("stock", 1, {"forward": "rank0", "backward": "rank1"}),
        ("stock", 3, {"forward": "rank1"}),
        ("zb-v", 3, {}),
        ("zb-v", 1, {"forward": "rank3", "backward": "rank3"}),
        ("zb-v", 3, {"forward": "rank1", "backward": "rank1"}),
        ("zb-v", 1, {"forward": "rank1", "backward": "rank1"}),
    ]
    assert [one.real for one in report.ranks[:3]] == [(), ("forward",), ("forward",)]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"trained": 0}, "zb-h1, rank 1 trained 0 of 5 steps"),
        ({"digest": "another"}, "ran another program"),
    ],
)
def test_a_record_that_shows_nothing_ends_the_rehearsal(
    tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    run = stand_in(tmp_path, "zb-h1")
    run.change = lambda record: replace(record, **change)
    with pytest.raises(ValueError, match=told):
        rehearse(request(tmp_path, "zb-h1"), run.start, print)


@pytest.mark.parametrize(
    ("schedules", "ranks", "number"), [("stock", 16, 3), ("zb-h1", 16, 3), ("zb-v v-half", 16, 4)]
)
def test_so_many_ranks_run(tmp_path: Path, schedules: str, ranks: int, number: int) -> None:
    made = prepared(
        *(tmp_path, schedules, ranks),
        pipeline_model_parallel_size=16,
        num_layers=32,
        global_batch_size=32,
    )
    assert sum(len(one.classes) for one in made.schedules) == number


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            {"tp_comm_overlap": True, "tensor_model_parallel_size": 2, "sequence_parallel": True},
            "--tp-comm-overlap",
        ),
        ({"use_sharp": True}, "--use-sharp is not tried in a rehearsal"),
        (
            {"pipeline_schedule": "zb-h1", "pipeline_post_validation": True},
            "--pipeline-post-validation",
        ),
        (
            {"pipeline_schedule": "zb-h1", "pipeline_rank_speeds": "1,1,0.8,1"},
            "--pipeline-rank-speeds is not tried",
        ),
        ({"pipeline_race": "1f1b zb-h1"}, "--pipeline-race is not tried"),
        ({"pipeline_model_parallel_size": 1}, "--pipeline-model-parallel-size"),
    ],
)
def test_what_is_not_tried_is_refused(tmp_path: Path, overrides: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told) as error:
        prepared(tmp_path, "zb-h1", 8, **overrides, global_batch_size=16)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("schedules", "told"),
    [
        (" ", "names no schedule"),
        ("stock stock", "names stock twice"),
        ("stock plan", "plan does not name a schedule"),
        ("zb-w", "zb-w"),
    ],
)
def test_schedules_are_named(schedules: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        schedules_of(schedules)


def test_more_steps_than_the_training_has_are_refused(tmp_path: Path) -> None:
    longer = replace(request(tmp_path, "zb-h1", train_iters=9), warm_up=7)
    with pytest.raises(ValueError, match="--train-iters 9: a rehearsal of 7 steps of --warm-up"):
        rehearse(longer, stand_in(tmp_path, "zb-h1").start, print)


def test_without_a_gpu_one_is_requested(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "gpu_here", lambda: None)
    made = CliRunner().invoke(app, ["rehearse", "--dir", str(tmp_path), "--", *words()])
    assert made.exit_code == 2
    assert made.output.count("\n") == 1 and "--cpu is missing: " in made.output


def test_ranks_that_do_not_fit_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "gpu_here", lambda: GpuHere("NVIDIA H200", 5.0 * 2**30))
    gpu = replace(request(tmp_path, "stock", vocab_size=128000), is_cpu=False)
    with pytest.raises(ValueError, match="5 GiB are free on this GPU, and predicted are") as error:
        rehearse(gpu, stand_in(tmp_path, "stock").start, print)
    text = str(error.value)
    assert "pipeline rank 0 of stock" in text and "\n" not in text
    assert "pipeline rank 1 of stock would fit" in text


def test_a_json_report_has_measured_and_estimated_apart(tmp_path: Path) -> None:
    report, _, _ = rehearsed(tmp_path, "zb-h1")
    (one,) = report.schedules
    assert one.seconds == one.passes + one.outside
    assert json.dumps(one.estimate.waiting) == "{}"
