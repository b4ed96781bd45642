"""Tests of the launcher: the script or command that it runs, the variables it sets, and how it ends
on a mistake."""

from __future__ import annotations

import argparse
import gc
import os
import re
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import megatron_ext.launch.script
from megatron_ext.__main__ import main
from megatron_ext.base import errors
from megatron_ext.base.errors import exit_for
from megatron_ext.config import PipelineConfig, flag
from megatron_ext.launch.command.importing import quickly
from megatron_ext.launch.script import Chosen, first_host, is_launch, slurm_ranks, without
from megatron_ext.written_settings import add_flags
from tests.helpers.forked import run_forked

SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_JOB_ID": "40017",
}


def launch(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, "-m", "megatron_ext", *words],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**env, "PYTHONPATH": str(Path(__file__).parents[3]), "PYTHONWARNINGS": "ignore"},
    )


def test_a_script_or_a_module_is_a_launch_and_a_word_is_a_command() -> None:
    assert is_launch(["pretrain_gpt.py", "--lr", "1"]) and is_launch(["-m", "train"])
    assert not is_launch(["doctor"]) and not is_launch([])


def test_ranks_come_from_srun_where_torchrun_has_set_none() -> None:
    assert slurm_ranks(SRUN) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": "20017",
    }
    assert slurm_ranks({**SRUN, "MASTER_PORT": "9"})["RANK"] == "5"
    assert "MASTER_PORT" not in slurm_ranks({**SRUN, "MASTER_PORT": "9"})
    assert slurm_ranks({**SRUN, "RANK": "0"}) == {}
    assert slurm_ranks({}) == {}


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[03-05,9],m1", "gpu03"),
        ("a-b[7]", "a-b7"),
        ("rack1-[2,4]", "rack1-2"),
        ("n[1-2]-ib,m3", "n1-ib"),
    ],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_a_batch_script_is_one_process() -> None:
    """A SLURM batch script counts as one process. SLURM gives its process a rank and no number of
    tasks, and the launch used to end with a KeyError."""
    batch = {"SLURM_PROCID": "0", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-4]"}
    alone = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "20007",
    }
    assert slurm_ranks(batch) == alone
    assert slurm_ranks({**batch, "SLURM_TASKS_PER_NODE": "4(x4)"}) == alone
    assert slurm_ranks({**SRUN, "SLURM_PROCID": "0"})["WORLD_SIZE"] == "8"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"SLURM_LOCALID": None}, "SLURM_LOCALID is not set, and SLURM_PROCID is"),
        ({"SLURM_NTASKS": None}, "SLURM_NTASKS is not set, and SLURM_PROCID is"),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID is 'x'"),
        ({"SLURM_STEP_TASKS_PER_NODE": "x"}, "SLURM_STEP_TASKS_PER_NODE is 'x'"),
        ({"SLURM_JOB_ID": ""}, "SLURM_JOB_ID is ''"),
        ({"SLURM_STEP_NODELIST": "[1-4]"}, "node list '[1-4]' is not understood: set MASTER_ADDR"),
        ({"SLURM_STEP_NODELIST": ""}, "node list '' is not understood: set MASTER_ADDR"),
        ({"SLURM_STEP_NODELIST": "r[1-2]n[3-4]"}, "is not understood: set MASTER_ADDR"),
    ],
)
def test_slurm_variables_that_are_missing_or_wrong(
    changed: dict[str, str | None],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Missing or wrong SLURM variables give an error that names them. Each case used to end in a
    traceback: of a KeyError, or of torch's error about an address."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(errors, "FIRST_SECONDS", 0.0)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**SRUN, **changed}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    (script := tmp_path / "train.py").touch()
    with pytest.raises(SystemExit, match="2"):
        main([str(script), "--pipeline-schedule", "zb-h1"])
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 and err.startswith("megatron_ext: error on ")


def test_the_script_runs_as_main_with_its_folder_and_arguments(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("name = 'beside the script'")
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, helper\n"
        "from megatron.core.pipeline_parallel import schedules as s\n"
        "print(__name__, helper.name, sys.argv[1:3], s.get_forward_backward_func.__module__)\n"
        "print(hasattr(s.get_forward_backward_func, '__wrapped__'))\n"
    )

    def launched() -> None:
        for name in ("RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
        main([str(script), "--lr", "1", "--pipeline-schedule", "zb-h1"])

    log = tmp_path / "log"
    status = run_forked(launched, log)
    said = log.read_text()
    assert status == 0, said
    assert "__main__ beside the script ['--lr', '1']" in said
    assert said.endswith("True\n"), "a flag of ours, and no patch"


@pytest.mark.parametrize(
    ("flags", "installed"),
    [
        ([], False),
        (["--lr", "1"], False),
        (["--pipeline-schedule", "zb-h1"], True),
        (["--help"], True),
    ],
)
def test_patches_come_before_the_script_and_only_with_a_flag_of_ours(
    flags: list[str],
    installed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Patches are applied before the script starts, in the same process, and only if the command
    has a flag of ours."""
    script = tmp_path / "train.py"
    script.write_text("print('script')")
    monkeypatch.setattr("megatron_ext.launch.script.install", lambda config: print("patches"))
    # With a GPU the launcher does not apply the patches of the CPU platform.
    monkeypatch.setattr("megatron_ext.launch.script._has_gpu", lambda: True)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    # Without the variable RANK, ranks would be read from a srun around the tests.
    monkeypatch.setenv("RANK", "0")
    main([str(script), *flags])
    assert capsys.readouterr().out.split() == ["patches"] * installed + ["script"]


@pytest.mark.parametrize(
    ("flags", "env", "argv", "said"),
    [
        ([], {"SCHEDULE": "zb-v"}, ["--pipeline-schedule", "zb-v"], "from the environment: --pip"),
        (["--pipeline-schedule", "zb-v"], {"SCHEDULE": "zb-v"}, [], None),
        (
            ["--pipeline-schedule", "zb-h1"],
            {"SCHEDULE": "zb-v"},
            [],
            "--pipeline-schedule zb-h1 counts, not MEGATRON_EXT_SCHEDULE=zb-v",
        ),
        (
            ["--pipeline-schedule=zb-h1"],
            {"MEMORY_LIMIT": "4", "REPORT_SPLIT": "1", "COSTS": "", "POST_VALIDATION": "0"},
            ["--pipeline-memory-limit", "4", "--pipeline-report-split"],
            "from the environment: --pipeline-memory-limit 4 --pipeline-report-split",
        ),
        (
            ["--pipeline-schedule", "zb-h1", "--pipeline-report-split"],
            {"REPORT_SPLIT": "0"},
            [],
            "--pipeline-report-split counts, not MEGATRON_EXT_REPORT_SPLIT=0",
        ),
        ([], {"NIGHTLY": "1", "ALLOW_UNKNOWN": "1"}, [], None),
    ],
)
def test_variables_stand_for_flags_and_a_flag_counts(
    flags: list[str],
    env: dict[str, str],
    argv: list[str],
    said: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A launch reads our environment variables in place of flags, and a flag has priority. It used
    to ignore the variables, which only `megatron_ext.auto` read, and trained under Megatron's own
    schedule without a message."""
    script = tmp_path / "train.py"
    script.write_text("import sys; print(sys.argv[1:])")
    parsed: list[str] = []
    monkeypatch.setattr(
        "megatron_ext.launch.script._have_parsed", lambda words, _: parsed.extend(words)
    )
    monkeypatch.setattr("megatron_ext.launch.script.install", lambda config: print("patches"))
    monkeypatch.setattr("megatron_ext.launch.script._has_gpu", lambda: True)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("RANK", "0")
    for name, value in env.items():
        monkeypatch.setenv(f"MEGATRON_EXT_{name}", value)
    main([str(script), *flags])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == str(flags)  # the script's own arguments stay as they are
    assert parsed == argv
    assert ("patches" in lines) == bool(flags or argv)
    told = [line for line in lines if line.startswith("megatron_ext: ")]
    assert len(told) == (said is not None) and (said is None or said in told[0])


@pytest.mark.parametrize("is_flag", [True, False])
def test_flags_of_a_plan_replace_those_of_the_command(
    is_flag: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron gets each flag of a plan once. It used to get --pipeline-p2p, which a plan leaves as
    it is, twice, and to get `--pipeline-schedule plan` before the flag with the chosen schedule."""
    script = tmp_path / "train.py"
    script.write_text("")
    given = ["--lr", "1", "--pipeline-schedule", "plan", "--micro-batch-size", "2"]
    if is_flag:
        given += ["--pipeline-p2p", "batched"]
    else:
        monkeypatch.setenv("MEGATRON_EXT_P2P", "batched")
    effective: list[str] = []
    monkeypatch.setattr(
        "megatron_ext.launch.script._have_parsed",
        lambda words, dropped: effective.extend([*without(given, dropped), *words]),
    )
    monkeypatch.setattr("megatron_ext.launch.script.install", lambda config: None)
    monkeypatch.setattr("megatron_ext.launch.script._has_gpu", lambda: True)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    flags = ("--pipeline-schedule", "zb-h1", "--pipeline-p2p", "batched")
    chosen = Chosen(flags, "why", ("--micro-batch-size",))
    megatron_ext.launch.script.launch([str(script), *given], lambda *_: chosen)
    assert effective == ["--lr", "1", *flags]


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"SHEDULE": "zb-v"}, "MEGATRON_EXT_SHEDULE is not a setting: did you mean MEGATRON_EXT_S"),
        ({"SCHEDULE": "zb-v", "REPORT_SPLIT": "yes"}, "write 1, or 0"),
        ({"COSTS": "f=1"}, "--pipeline-costs f=1 is given without --pipeline-schedule"),
    ],
)
def test_a_mistake_in_a_variable_ends_the_launch(
    env: dict[str, str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise AssertionError('ran')")
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setenv("RANK", "0")
    for name, value in env.items():
        monkeypatch.setenv(f"MEGATRON_EXT_{name}", value)
    with pytest.raises(SystemExit, match="2"):
        main([str(script)])
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("no_such.py",), "there is no script no_such.py"),
        (("-m",), "-m needs the name of a module"),
        (("x.py", "--pipeline-schedule", "zb-h9"), "there is no schedule 'zb-h9'; did you mean"),
        (("x.py", "--pipeline-schedule", "gpipe:a=1"), "gpipe has no option 'a'; it has none"),
        (("x.py", "--pipeline-costs", "f=1"), "without --pipeline-schedule"),
        (("x.py", "--pipeline-schedule", "none.csv"), "none.csv cannot be read"),
        (("--pipeline-schedule", "zb-h1", "x.py"), "--pipeline-schedule stands before the script"),
        (("--bf16", "-m", "x"), "write it behind the script, -m megatron_ext -m x --bf16 ..."),
        (("x.py", "--pipeline-trace", "t", "--pipeline-p2p", "batched"), "without --pipeline-sche"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    words: tuple[str, ...],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "x.py").write_text("print('ran')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert text in line and "ran" not in said.out


def test_a_search_that_finds_nothing_ends_the_training_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A memory limit that only a search finds too low ends the training in one line. The first step
    used to end in a traceback on every rank. (The test emulates a GPU, because the CPU platform
    would import Megatron.)"""
    (script := tmp_path / "x.py").write_text(
        "from megatron_ext.compile.program.verify import OverLimit\nraise OverLimit('too low')"
    )
    monkeypatch.setattr(megatron_ext.launch.script, "_has_gpu", lambda: True)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="2"):
        main([str(script)])
    assert capsys.readouterr().err == "megatron_ext: error: too low\n"


OF_SCRIPT = 'add_argument("--pipeline-schedule", default="a")'


@pytest.mark.parametrize(
    "lines",
    [
        f"{{add}}; parser.{OF_SCRIPT}",
        f"{{add}}; parser.add_argument_group('mine').{OF_SCRIPT}",
    ],
)
def test_a_flag_of_the_scripts_own(
    lines: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script whose parser has a flag with the name of one of ours gets a one-line error. It used
    to end in argparse's traceback."""
    add = "parser = add_flags(argparse.ArgumentParser())"
    imports = "import argparse\nfrom megatron_ext.written_settings import add_flags\n"
    (script := tmp_path / "x.py").write_text(imports + lines.format(add=add))
    monkeypatch.setattr(megatron_ext.launch.script, "_has_gpu", lambda: True)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="2"):
        main([str(script)])
    assert capsys.readouterr().err == (
        "megatron_ext: error: --pipeline-schedule: the script's parser has a flag of that name, "
        "and megatron_ext adds one: rename the script's\n"
    )


def test_a_parser_with_a_flag_that_is_named_as_ours() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pipeline-schedule")
    with pytest.raises(ValueError, match="--pipeline-schedule: the script's parser has a flag"):
        add_flags(parser)
    assert add_flags(add_flags(argparse.ArgumentParser())), "ours are added once"


def test_a_mistake_ends_the_process_with_status_2(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("print('ran')")
    result = launch("x.py", "--pipeline-schedule", "zb-h9", cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    assert "there is no schedule 'zb-h9'" in result.stderr and "Traceback" not in result.stderr
    assert "ran" not in result.stdout


def test_flags_leave_plain_values_in_the_arguments() -> None:
    """Our flags leave only plain values in Megatron's arguments. A checkpoint stores these
    arguments. Without our package it could not be loaded, because the default of --pipeline-p2p
    used to be a member of an enum of ours."""
    arguments = add_flags(argparse.ArgumentParser()).parse_args(["--pipeline-schedule", "1f1b"])
    assert {type(value) for value in vars(arguments).values()} <= {str, bool, type(None)}


TRACE: dict[str, Any] = {"schedule": "1f1b", "trace": "folder"}


def test_the_iterations_to_trace() -> None:
    """--pipeline-trace needs no iterations, and accepts a range of them. Users who wished to know
    only the bubble used to have to name iterations."""
    assert PipelineConfig.parse(**TRACE).trace_iters is None
    assert PipelineConfig.parse(**TRACE, trace_iters="10:12").trace_iters == range(10, 12)


def test_settings_that_act_on_megatrons_own_pipeline() -> None:
    alone = PipelineConfig.parse(trace="folder")
    assert alone.watches_stock and alone.schedule is None
    assert PipelineConfig.parse(trace="folder", trace_iters="2:3").watches_stock
    assert not PipelineConfig.parse(**TRACE).watches_stock
    assert not PipelineConfig().watches_stock
    with pytest.raises(ValueError, match="--pipeline-costs profile is given without --pipeline-s"):
        PipelineConfig.parse(trace="folder", costs="profile")


@pytest.mark.parametrize(
    "setting",
    [
        {"p2p": "batched"},
        {"vocab_parallel": "1"},
        {"activation_offload": "full"},
        {"costs": "profile"},
    ],
)
def test_what_does_not_go_with_post_validation(setting: dict[str, Any]) -> None:
    ((name, value),) = setting.items()
    PipelineConfig.parse(schedule="zb-v", post_validation=True)
    PipelineConfig.parse(schedule="zb-v", **setting)
    text = f"--pipeline-post-validation does not go with {flag(name)} {value}: "
    with pytest.raises(ValueError, match=re.escape(text)):
        PipelineConfig.parse(schedule="zb-v", post_validation=True, **setting)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"schedule": "1f1b", "trace_iters": "1:2"}, "--pipeline-trace-iters has no folder"),
        ({"trace_iters": "1:2"}, "--pipeline-trace-iters has no folder"),
        *(
            (TRACE | {"trace_iters": text}, f"--pipeline-trace-iters {text} is not A:B with 1 <= A")
            for text in ("", "3", "3:", ":3", "0:3", "3:3", "4:3", "-1:3", "a:b", "1:2:3", "1.5:3")
        ),
    ],
)
def test_iterations_that_cannot_be_traced(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        PipelineConfig.parse(**settings)


def test_a_setting_that_there_is_not() -> None:
    with pytest.raises(TypeError, match="no setting 'schedules': write one of schedule, memory"):
        PipelineConfig.parse(schedules="1f1b")


def test_none_is_a_default() -> None:
    nothing = {setting.name: None for setting in fields(PipelineConfig)}
    assert PipelineConfig.parse(**nothing) == PipelineConfig()


HOST = socket.gethostname()


class Node:
    """Ranks of a launch on one node, which meet the same error one after another."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp: Path
    ) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys
        monkeypatch.setenv("TMPDIR", str(tmp))
        monkeypatch.setattr(errors, "FIRST_SECONDS", 0.1)

    def says(self, rank: str, local_rank: str | None, text: str = "no such file") -> str:
        """Let a rank exit with the error ``text``, and return the line that it prints."""
        self._monkeypatch.setenv("RANK", rank)
        self._monkeypatch.delenv("LOCAL_RANK", raising=False)
        if local_rank is not None:
            self._monkeypatch.setenv("LOCAL_RANK", local_rank)
        with pytest.raises(SystemExit, match="2"):
            exit_for(ValueError(text))
        return self._capsys.readouterr().err.strip()


@pytest.fixture
def node(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Node:
    return Node(monkeypatch, capsys, tmp_path)


@pytest.mark.parametrize(
    ("rank", "local_rank", "said"),
    [
        ("0", "0", "megatron_ext: error: no such file"),
        ("8", "0", f"megatron_ext: error on {HOST}: no such file"),
        ("9", "1", f"megatron_ext: error on {HOST}, global rank 9: no such file"),
        ("1", None, f"megatron_ext: error on {HOST}, global rank 1: no such file"),
    ],
)
def test_a_mistake_of_one_rank_or_node_is_said_by_it(
    rank: str, local_rank: str | None, said: str, node: Node
) -> None:
    """A mistake that only one rank or node makes is printed by that rank. At first only global rank
    0 printed mistakes, and later only the first rank of each node. A schedule file that was missing
    on another node, or a wrong variable on another rank, then ended the launch with status 2 and no
    message."""
    assert node.says(rank, local_rank) == said


def test_a_mistake_of_all_ranks_is_said_once_a_node(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistake that all ranks make is printed once on each node. Without this, eight ranks of a
    node would print the same line."""
    assert node.says("8", "0") and not node.says("9", "1") and not node.says("11", "3")
    # Among ranks other than the first one of a node, the first that comes to a mistake prints it. A
    # mistake with another text is another mistake.
    assert node.says("9", "1", "PROFILE=x") and not node.says("10", "2", "PROFILE=x")
    assert node.says("10", "2", "PROFILE=y")
    # The first rank of a node prints the mistake even if another rank was faster.
    assert node.says("0", "0", "PROFILE=y") == "megatron_ext: error: PROFILE=y"
    # After a restart, and in a later launch, mistakes are printed again.
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert node.says("9", "1", "PROFILE=x")
    monkeypatch.setattr(errors, "RECENT_SECONDS", 0.0)
    assert node.says("9", "1", "PROFILE=x")


def test_a_mistake_is_said_where_nothing_can_be_written(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistake is printed even if a rank cannot write the file by which the others know that it
    was printed (full disk, no temporary folder); the line may then be printed twice. A process
    without stderr exits with the same status."""
    monkeypatch.setenv("TMPDIR", "/proc/nothing/here")
    assert node.says("9", "1") and node.says("10", "2")
    monkeypatch.setattr("sys.stderr", None)
    with pytest.raises(SystemExit, match="2"):
        exit_for(ValueError("no such file"))


def test_a_rank_of_srun_says_a_mistake_before_it_has_torchs_variables(
    node: Node, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the first of the ranks that srun starts on a node prints a mistake that comes before
    torch's variables are set. Each rank used to take itself for the first, and eight lines were
    printed."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_STEP_ID", "3")
    for rank, said in (("4", f"error on {HOST}: "), ("5", "")):
        monkeypatch.setenv("SLURM_PROCID", rank)
        monkeypatch.setenv("SLURM_LOCALID", str(int(rank) - 4))
        with pytest.raises(SystemExit, match="2"):
            main(["no_such.py"])
        err = capsys.readouterr().err
        assert err == (f"megatron_ext: {said}there is no script no_such.py\n" if said else "")


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_quick_import_leaves_the_garbage_collector_as_it_was(is_enabled: bool) -> None:
    """`quickly`, which imports with the garbage collector off, leaves the collector as it was. It
    used to switch the collector on for callers who had disabled it."""
    if not is_enabled:
        gc.disable()
    try:
        with quickly():
            assert not gc.isenabled()
        assert gc.isenabled() is is_enabled
    finally:
        gc.enable()
