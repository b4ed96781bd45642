"""The commands, as a user types them and as a program reads them."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_ext.cli import app
from megatron_ext.schedule.action import parse
from megatron_ext.schedule.schedule_csv import from_csv
from tests.helpers.schedules import line_problem, program

runner = CliRunner()


def run(*words: str, code: int = 0) -> str:
    result = runner.invoke(app, words)
    assert result.exit_code == code, result.output
    return result.output if code else result.stdout


def test_schedules_lists_every_family() -> None:
    rows = json.loads(run("schedules", "--json"))
    assert {"gpipe", "1f1b", "zb-h1"} <= {row["name"] for row in rows}
    keys = {"name", "placement", "chunks", "uses_costs", "source"}
    assert all(row.keys() == keys for row in rows)
    assert "zb-h1" in run("schedules")


def test_simulate_prints_one_object() -> None:
    result = json.loads(run("simulate", "1f1b", "--pp", "8", "-m", "32", "--json"))
    assert result["makespan"] == 117 and result["work"] == 96
    assert result["peak_activation_microbatches"] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert result["bitwise_order"] is True and result["memory_limit"] is None
    assert result["bubble_share_makespan"] == pytest.approx(21 / 117)


def test_simulate_shows_what_one_communicator_costs() -> None:
    """A hop as long as a pass: with a channel each, the two ways of a rank's messages overlap."""
    words = ("simulate", "interleaved", "--pp", "4", "-m", "8", "--costs", "f=1,i=1,w=1,comm=1")
    alone, together = (
        json.loads(run(*words, "--p2p", p2p, "--json"))["makespan"] for p2p in ("async", "batched")
    )
    assert together > alone


HEAD = ("--costs", "f=10,i=12,w=8,comm=1,head=10/12/8,embedding=1/2")


def test_simulate_divides_the_vocabulary(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    words = ("simulate", "zb-h1", "--pp", "4", "-m", "16", *HEAD)
    whole, one, two = (
        json.loads(run(*words, "--vocab-parallel", how, "--trace", str(trace), "--json"))
        for how in ("none", "1", "2")
    )
    assert [found["vocabulary"] for found in (whole, one, two)] == ["none", "1", "2"]
    assert max(one["makespan"], two["makespan"]) < 0.75 * whole["makespan"]
    assert [found["peak_activation_microbatches"][0] for found in (whole, one, two)] == [4, 6, 5]
    # The embedding's two passes and the head's three are the same work, divided.
    assert one["work"] == two["work"] == pytest.approx(whole["work"])
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"0S0", "3SW15", "0GATHER_S0"} <= names


def test_plan_compares_what_can_be_done_about_a_head() -> None:
    words = ("plan", "--pp", "2", "-m", "4", "--memory-limit", "2")
    assert json.loads(run(*words, "--json"))["vocabulary"] == []
    found = json.loads(run(*words, *HEAD, "--layers", "7", "--json"))
    rows = {row["schedule"]: row for row in found["vocabulary"]}
    assert rows.keys() == {row["schedule"] for row in found["schedules"]}
    one = rows["1f1b"]
    assert one["redistributed"] < one["naive"]
    # Two ranks hold two microbatches; one more is over the limit.
    assert one["2"] is None and "least feasible limit for it is 3" in one["refused"]["2"]


def test_simulate_draws_and_writes_a_table_that_it_reads_back(tmp_path: Path) -> None:
    picture, table = tmp_path / "x.svg", tmp_path / "x.csv"
    sizes = ("--pp", "3", "-m", "4")
    made = json.loads(
        run("simulate", "zb-h1", *sizes, "--json", "--csv", str(table), "--plot", str(picture))
    )
    assert "<svg" in picture.read_text()
    assert len(from_csv(table.read_text(), "x").rows) == 3
    read = json.loads(run("simulate", str(table), *sizes, "--json"))
    assert read["makespan"] == made["makespan"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("simulate", "zb-h9", "--pp", "2", "-m", "2"), "known are"),
        (("simulate", "1f1b", "--pp", "4", "-m", "8", "--memory-limit", "3"), "0F3 brings rank 0"),
        (("simulate", "1f1b", "--pp", "4", "-m", "0"), "microbatches is 0"),
        (("simulate", "1f1b", "--pp", "0", "-m", "4"), "pipeline ranks is 0"),
        (("simulate", "1f1b", "--pp", "4", "-m", "8", "--costs", "f=1"), "missing ['i', 'w']"),
        (("simulate", "1f1b", "--pp", "4", "-m", "8", "--plot", "x.pdf"), ".svg or .png"),
        (("simulate", "1f1b", "--pp", "4", "-m", "8", "--costs", "no.json"), "cannot be read"),
        (
            ("simulate", "1f1b", "--pp", "2", "-m", "2", "--vocab-parallel", "2", "--certify"),
            "no bound with vocabulary parallelism 2",
        ),
        (
            ("simulate", "1f1b", "--pp", "2", "-m", "2", "--vocab-parallel", "1", "--csv", "x.csv"),
            "added a second time",
        ),
        (("doctor", "--pipeline-memory-limit", "4"), "without --pipeline-schedule"),
        (("doctor", "--pipeline-schedule", "1f1b", "--pipeline-p2p", "fast"), "async or batched"),
    ],
)
def test_a_mistake_exits_2_and_says_why(words: tuple[str, ...], text: str) -> None:
    assert text in run(*words, code=2)


def test_doctor_with_no_flag_of_ours_tells_whether_all_patches_fit() -> None:
    found = json.loads(run("doctor", "--json"))
    assert found["environment"]["megatron-core"].startswith("0.19")
    assert found["patches"] and {patch["state"] for patch in found["patches"]} == {"fits"}
    assert found["allow_unknown"] == ""
    count = len(found["patches"])
    text = run("doctor")
    assert text.index("torch") < text.index(f"all {count} patches of ours fit this Megatron")
    assert "fits: " not in text and run("doctor", "--patches").count("\nfits: ") == count
    assert "zb-h1" not in run("doctor", "--patches"), "nobody has asked for it"


def test_doctor_takes_no_more_than_it_needs() -> None:
    """It took 13 CPU seconds, nine of them for torch's compiler, which compiled nothing."""
    program = (
        "import sys; from megatron_ext.cli import app\n"
        "app(['doctor'], standalone_mode=False)\n"
        "assert 'torch._inductor.compile_fx' not in sys.modules\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds < 8, "four on a machine that does nothing else"


def test_doctor_shows_what_a_flag_would_apply() -> None:
    found = json.loads(run("doctor", "--json", "--pipeline-schedule", "1f1b"))
    states = {patch["feature"]: patch["state"] for patch in found["patches"]}
    assert states["schedule"] == states["flags"] == "would be applied"
    assert states["split backward of local linear layers"] == "fits"
    assert all(patch["reason"] and patch["target"] for patch in found["patches"])
    wanted = sum(patch["wanted"] for patch in found["patches"])
    text = f"all {wanted} patches that --pipeline-schedule 1f1b needs fit this Megatron"
    assert text in run("doctor", "--pipeline-schedule", "1f1b")


def test_doctor_knows_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    assert json.loads(run("doctor", "--json"))["environment"]["ROCm"].startswith("6.4.1: untried")


def test_a_whole_program_is_written_for_others_to_check(tmp_path: Path) -> None:
    """Each rank's row with its messages and waits, in the text form that `parse` reads."""
    file = tmp_path / "rows.txt"
    options = ["--pp", "2", "-m", "2", "--program", str(file)]
    answer = json.loads(run("simulate", "1f1b", *options, "--json"))
    assert answer["makespan_if_passes_wait"] >= answer["makespan"]
    rows = [list(map(parse, line.split(","))) for line in file.read_text().splitlines()]
    assert rows == [list(row) for row in program("1f1b", line_problem(2, 2)).schedule.rows]
