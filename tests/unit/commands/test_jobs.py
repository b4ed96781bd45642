"""Tests of the argument JOB of `plan` and `doctor`, and of the options that each kind of job
accepts."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from megatron_ext.cli import app
from megatron_ext.commands.doctor import check_doctor
from megatron_ext.commands.jobs.job_argument import JobArgument, JobKind, parse_job
from megatron_ext.commands.jobs.job_sizes import JobSizes, parse_sizes
from megatron_ext.commands.jobs.plan_options import PlanOptions, check_plan
from megatron_ext.commands.jobs.planned_job import launch_request
from megatron_ext.schedule.slices import Slices

SIZES = "layers=16,hidden=1024,heads=8,sequence=1024,vocabulary=32000,pp=4,m=8,tp=2,dp=2"


def job_of(
    *words: str, flags: tuple[str, ...] = (), command: tuple[str, ...] | None = None
) -> JobArgument:
    job = parse_job(words, flags, command)
    assert job is not None
    return job


JOBS = {
    "command": job_of(command=("torchrun", "--nproc-per-node", "8", "pretrain_gpt.py")),
    "recipe": job_of("my.recipes:gpt_13b"),
    "file": job_of("model.json"),
    "log": job_of("train.log"),
    "model": job_of(SIZES),
    "costs": job_of("pp=4,m=8"),
}
VALUES: dict[str, Any] = {
    "gpu": "h100",
    "memory_limit": "0.5x",
    "costs": "f=1,i=1,w=1",
    "rank_speeds": "1,1,0.7,1",
    "trace": Path("traces"),
    "world_size": 16,
    "vision": "siglip,tokens=4096",
    "any_sizes": True,
    "lengths": Path("lengths.txt"),
    "all": True,
    "plot": Path("plan.svg"),
    "html": Path("plan.html"),
    "json": True,
}
ALONE = {"costs", "rank_speeds", "memory_limit", "all", "plot", "html", "lengths"}


def refused(job: str, *names: str) -> set[str]:
    """Return the options of ``names`` that must be refused, by rules that are written here
    independently of the code: options that ``job`` lacks, and those that conflict with
    --any-sizes."""
    given = set(names)
    lacks = {"world_size", "any_sizes"} if job in ("model", "costs") else set()
    lacks |= {"gpu", "vision"} if job == "costs" else set()
    lacks |= ALONE if "any_sizes" in given else set()
    return given & lacks


@pytest.mark.parametrize("job", JOBS)
def test_every_pair_of_options_is_taken_or_refused_in_one_sentence(job: str) -> None:
    assert VALUES.keys() == {field.name for field in fields(PlanOptions)}
    taken = 0
    for first, second in combinations([*VALUES, None], 2):
        names = [name for name in (first, second) if name is not None]
        options = PlanOptions(**{name: VALUES[name] for name in names})
        wrong = refused(job, *names)
        lacks_gpu = options.any_sizes and options.gpu is None and job != "log"
        try:
            check_plan(JOBS[job], options)
        except ValueError as error:
            text = str(error)
            assert wrong or lacks_gpu, f"{names}: {text}"
            assert "\n" not in text and ". " not in text and len(text) < 300, text
            named = re.findall(r"--[a-z-]+", text.split(":")[0].split(" ")[0])
            assert not wrong or {n[2:].replace("-", "_") for n in named} <= wrong, text
        else:
            assert not wrong and not lacks_gpu, names
            taken += 1
    assert taken > 30


def test_help_shows_few_options_and_says_which_depend_on_the_job() -> None:
    for name, most in (("plan", 14), ("doctor", 14)):
        command = get_command(app).commands[name]  # type: ignore[attr-defined]
        options = [one for one in command.params if one.param_type_name == "option"]
        assert len(options) + 1 <= most  # --help is one more
        texts = {one.opts[0]: one.help for one in options}
        assert texts["--world-size"].startswith("For launches: ")
        if name == "plan":
            assert texts["--any-sizes"].startswith("For launches: ")
            assert texts["--vision"].startswith("For jobs with a model: ")
            assert {one.name for one in options} >= {"gpu", "costs", "trace", "lengths"}


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("my_recipes:gpt_13b", JobKind.RECIPE),
        ("megatron.bridge.recipes.gpt:small", JobKind.RECIPE),
        ("runs/model.json", JobKind.ARGUMENTS),
        ("train.log", JobKind.LOG),
        ("runs/lr=1e-4/train.log", JobKind.LOG),
        ("./pp=4.log", JobKind.LOG),
        ("slurm-123.out", JobKind.LOG),
        ("pp=4,m=8", JobKind.SIZES),
        (SIZES, JobKind.SIZES),
    ],
)
def test_a_word_says_which_job_it_is(word: str, kind: JobKind) -> None:
    assert job_of(word, flags=("--pipeline-schedule", "zb-v")) == JobArgument(
        kind, word, ("--pipeline-schedule", "zb-v")
    )


def test_a_file_without_a_suffix_is_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log may have any name. A misspelt option after a log named run7 used to give the error
    "run7 begins a launch command: write -- before it"."""
    monkeypatch.chdir(tmp_path)
    Path("run7").write_text("")
    made = CliRunner().invoke(app, ["plan", "run7", "--memory-limt", "0.5x"])
    assert made.exit_code == 2
    assert "begins a launch command" not in made.output and "--memory-limt" in made.output


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "a plan needs a job: a launch command behind --"),
        (("torchrun", "x.py"), "'torchrun x.py'|torchrun x.py: a job is one word, such as"),
        (("pretrain_gpt.py",), "pretrain_gpt.py begins a launch command: write --"),
        (("train.log", "--", "x.py"), "train.log and the launch command behind -- are two jobs"),
        (("--pipeline-slices", "2", "--", "x.py"), "--pipeline-slices stands before --"),
        (("--",), "-- is followed by nothing"),
        (
            ("pp=4,m=8", "--pipeline-recompute", "fit"),
            "a plan of sizes accepts only --pipeline-slices",
        ),
        (("pp=4,m=8", "--pipeline-schedule", "zb-v"), "--pipeline-schedule: a plan of sizes"),
        (("pp=4,m=8", "--pipeline-slices", "x"), "--pipeline-slices x: write a number"),
        (("pp=4,m=8", "--pipeline-shedule", "x"), r"No such option:? '?--pipeline-shedule"),
        # These sizes alone make a plan by costs, which refuses tp= and dp=. The error used to
        # advise writing these two.
        (("pp=4,m=8", "--world-size", "8"), "only a launch has a world size, and costs alone"),
        ((SIZES, "--world-size", "8"), "only a launch has a world size; write tp= and dp="),
        (("pp=4,m=8", "--pipeline-memory-limit", "5"), "for sizes, write --memory-limit 5"),
        # The size distributed-optimizer used to have no effect here.
        (("pp=4,m=8,distributed-optimizer=true",), "distributed-optimizer needs the sizes of a"),
        # The error used to say only that torchrun's option is no option of plan.
        (("torchrun", "--nnodes", "2", "x.py"), "torchrun begins a launch command: write --"),
        (("--gpu", "h100", "python3.12", "x.py", "--bf16"), "python3.12 begins a launch command"),
        (("train.log", "--gpuu"), r"No such option:? '?--gpuu"),
        (("pp=4",), "missing m; write pp=8,m=64"),
        (("no.log",), "log no.log: No such file or directory; write the path of a training's log"),
    ],
)
def test_a_mistake_in_a_job_is_one_line(
    words: tuple[str, ...], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = CliRunner().invoke(app, ["plan", *words])
    assert ended.exit_code == 2 and re.search(text, ended.output), ended.output


def test_a_file_that_is_there_is_a_log_whatever_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that exists is read as a log, also if its name looks like sizes of a model. A log
    named lr=3e-4.log used to be read as sizes."""
    monkeypatch.chdir(tmp_path)
    assert job_of("lr=3e-4.log").kind is JobKind.SIZES
    Path("lr=3e-4.log").touch()
    assert job_of("lr=3e-4.log").kind is JobKind.LOG


def test_doctor_without_a_job_refuses_a_flag_that_no_patch_depends_on() -> None:
    result = CliRunner().invoke(app, ["doctor", "--overlap-moe-expert-parallel-comm"])
    assert result.exit_code == 2 and "there is no JOB to check" in result.output


def test_doctor_checks_launches_alone() -> None:
    every = ["--gpu", "--world-size", "--patches", "--versions"]
    for job in JOBS:
        for given in (*combinations(every, 2), *((name,) for name in every), ()):
            of_environment = [name for name in given if name in every[2:]]
            try:
                check_doctor(JOBS[job], given)
            except ValueError as error:
                assert of_environment or job in ("model", "costs"), error
                assert ", ".join(of_environment) in str(error) or "only the sizes of one" in str(
                    error
                )
            else:
                assert not of_environment and job not in ("model", "costs")
    with pytest.raises(ValueError, match=r"^--gpu, --world-size: there is no JOB to check; drop"):
        check_doctor(None, every)
    check_doctor(None, every[2:])


def test_doctor_takes_gpus_of_one_kind() -> None:
    """`doctor` refuses a --gpu with two types of GPUs. It used to give all ranks the rates of the
    first type."""
    result = CliRunner().invoke(app, ["doctor", "--gpu", "h100:6,a100-40:2", "a.json"])
    assert result.exit_code == 2 and "GPUs of one kind; name one GPU" in result.output


def test_sizes_are_read() -> None:
    assert parse_sizes("pp=4,m=8") == JobSizes(4, 8)
    assert parse_sizes("m=8, pp=4, layers=32") == JobSizes(4, 8, layers=32)
    sizes = parse_sizes(f"{SIZES},distributed-optimizer=true")
    assert (sizes.pp, sizes.m, sizes.tp, sizes.dp, sizes.layers) == (4, 8, 2, 2, 16)
    assert sizes.distributed_optimizer and sizes.model is not None and sizes.model.hidden == 1024


def test_flags_behind_sizes_are_options_of_their_schedules() -> None:
    flags = ("--pipeline-slices=4", "--pipeline-slice-lengths", "balanced")
    cut = check_plan(job_of("pp=4,m=8", flags=flags), PlanOptions()).schedules
    assert cut.slices == Slices(4, "balanced") and not cut.pairs  # type: ignore[arg-type]
    joined = (*flags, "--pipeline-join-slice-weights")
    with_joined = check_plan(job_of("pp=4,m=8", flags=joined), PlanOptions()).schedules
    assert with_joined.slices == replace(cut.slices, joined_weights=True)
    overlap = job_of("pp=4,m=8", flags=("--overlap-moe-expert-parallel-comm",))
    assert check_plan(overlap, PlanOptions(costs="f=1,i=1,w=1")).schedules.pairs
    late = job_of("pp=4,m=8", flags=("--pipeline-post-validation",))
    assert check_plan(late, PlanOptions()).schedules.steps_overlap


def test_flags_behind_a_file_of_arguments_are_those_of_its_launch(tmp_path: Path) -> None:
    """Flags after a file of arguments belong to its launch, as after a command. After such a file,
    slices used to be accepted without a schedule of ours, although Megatron's schedule has none,
    and --overlap-moe-expert-parallel-comm was ignored."""
    file = tmp_path / "a.json"
    file.write_text("{}")
    overlap = job_of(str(file), flags=("--overlap-moe-expert-parallel-comm",))
    request = launch_request(check_plan(overlap, PlanOptions()))
    assert request.values["overlap_moe_expert_parallel_comm"] is True
    sliced = check_plan(job_of(str(file), flags=("--pipeline-slices", "2")), PlanOptions())
    with pytest.raises(ValueError, match="--pipeline-slices 2 is given without --pipeline-sch"):
        launch_request(sliced)


def test_an_option_that_overrules_a_setting_of_the_launch_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line on stderr says that --memory-limit overrules the launch's --pipeline-memory-limit.
    That line used to be missing."""
    file = tmp_path / "a.json"
    file.write_text('{"pipeline_memory_limit": 5}')
    schedule = ("--pipeline-schedule", "zb-v")
    for flags, said in (
        (schedule, "--memory-limit 4 counts, not --pipeline-memory-limit 5 of the file"),
        (("--pipeline-memory-limit", "6", *schedule), "not --pipeline-memory-limit 6 of the file"),
        (("--pipeline-memory-limit", "4", *schedule), ""),
    ):
        job = job_of(str(file), flags=flags)
        request = launch_request(check_plan(job, PlanOptions(memory_limit="4")))
        assert request.settings[-2:] == ("--pipeline-memory-limit", "4")
        error = capsys.readouterr().err
        assert said in error and bool(error) == bool(said)
    file.write_text('{"world_size": 8}')
    command = ("torchrun", "--nproc-per-node", "8", "x.py")
    for job in (job_of(str(file)), job_of(command=command)):
        for ranks in (8, 16):
            request = launch_request(check_plan(job, PlanOptions(world_size=ranks)))
            said = f"--world-size 16 counts, not 8 of the {job.kind}\n" if ranks == 16 else ""
            assert request.world_size == ranks and capsys.readouterr().err == said
