"""Tests of the commands: their text for users, and the JSON that programs read."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_ext.cli import app
from megatron_ext.schedule.action import parse_action
from megatron_ext.schedule.schedule_csv import from_csv
from tests.helpers.few_families import only_families
from tests.helpers.forked import run_forked
from tests.helpers.schedules import line_problem, program
from tests.helpers.svg import texts_of

runner = CliRunner()


def run(*words: str, code: int = 0) -> str:
    result = runner.invoke(app, words)
    assert result.exit_code == code, result.output
    return result.output if code else result.stdout


def test_schedules_lists_every_family() -> None:
    rows = json.loads(run("schedules", "--json"))
    assert {"gpipe", "1f1b", "zb-h1"} <= {row["name"] for row in rows}
    keys = {"name", "maturity", "placement", "chunks", "uses_costs", "source"}
    assert all(row.keys() == keys for row in rows)
    marks = {row["name"]: row["maturity"] for row in rows}
    assert (marks["zb-h1"], marks["v-min"], marks["2bp"]) == (
        "stable",
        "experimental",
        "laboratory",
    )
    assert "zb-h1" in run("schedules")


def test_simulate_prints_one_object() -> None:
    result = json.loads(run("simulate", "1f1b", "--pp", "8", "-m", "32", "--json"))
    assert result["makespan"] == 117 and result["work"] == 96
    assert result["peak_activation_microbatches"] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert result["bitwise_order"] is True and result["memory_limit"] is None
    assert result["bubble_share_makespan"] == pytest.approx(21 / 117)


def test_simulate_refuses_options_without_effect(tmp_path: Path) -> None:
    """`simulate` refuses options that would have no effect, such as --steps without a picture. It
    used to accept them, and nothing was drawn or limited."""
    words = ("simulate", "1f1b", "--pp", "2", "-m", "2")
    assert "add --plot, --html or --perfetto" in run(*words, "--steps", "3", code=2)
    told = run(*words, "--slice-lengths", "balanced", code=2)
    assert "--slice-lengths balanced is given without --slices" in told
    run(*words, "--steps", "3", "--perfetto", str(tmp_path / "steps.json"))


def test_a_picture_of_the_reference_itself_has_one_timeline(tmp_path: Path) -> None:
    """`simulate 1f1b --plot` draws one timeline, because 1F1B is also the baseline. It used to draw
    1F1B twice, with the same title."""
    pytest.importorskip("matplotlib")
    picture, sizes = tmp_path / "picture.svg", ("--pp", "2", "-m", "2")
    for spec, drawn in (("1f1b", ["1f1b"]), ("zb-h1", ["1f1b", "zb-h1"])):
        run("simulate", spec, *sizes, "--plot", str(picture))
        texts = texts_of(picture.read_text())
        assert [text.split(":")[0] for text in texts if "of the makespan" in text] == drawn


def test_simulate_shows_what_one_communicator_costs() -> None:
    """`simulate --p2p batched` gives a longer makespan than async, as all messages share one
    communicator. Here a message takes as long as a pass; with a communicator for each channel,
    messages in both directions of a rank overlap."""
    words = ("simulate", "interleaved", "--pp", "4", "-m", "8", "--costs", "f=1,i=1,w=1,comm=1")
    alone, together = (
        json.loads(run(*words, "--p2p", p2p, "--json"))["makespan"] for p2p in ("async", "batched")
    )
    assert together > alone


def test_simulate_is_for_people() -> None:
    """`simulate` prints plain text with units. It used to print names of variables, None as a
    column, True and False, and times without a unit."""
    said = run("simulate", "1f1b", "--pp", "4", "-m", "8", "--costs", "f=2,i=2,w=2")
    assert "None" not in said and "True" not in said and "_" not in said
    assert re.search(r"bubble +27.3% of the makespan, 27.3% of the span", said)
    assert re.search(r"peak activations +4, 3, 2, 1 microbatches, rank by rank", said)
    assert "times are in the unit of the costs (f=2,i=2,w=2)" in said
    alone = run("simulate", "1f1b", "--pp", "1", "-m", "1", "--memory-limit", "1")
    assert "1 microbatches" not in alone and re.search(r"memory limit +1 microbatch\b", alone)
    many = run("simulate", "1f1b", "--pp", "20", "-m", "40")
    assert re.search(r"peak activations +1 to 20 microbatches on a rank", many)


@pytest.mark.parametrize(("microbatches", "refuses"), [(3, True), (6, True), (8, False)])
def test_simulate_says_where_stocks_interleaved_schedule_does_not_run(
    microbatches: int, refuses: bool
) -> None:
    """`simulate interleaved` says if stock's interleaved schedule refuses the number of
    microbatches. Our schedule accepts any number, and the text "stock's to the last bit" used to
    read as if stock's schedule did so too."""
    text = " ".join(run("simulate", "interleaved", "--pp", "4", "-m", str(microbatches)).split())
    assert "stock Megatron's to the last bit" in text
    told = f"its own interleaved schedule refuses {microbatches} microbatches"
    assert (told in text) == refuses


def test_simulate_says_what_a_certificate_is_worth() -> None:
    words = ("simulate", "1f1b", "--pp", "4", "-m", "8", "--certify", "1")
    assert "proved: no schedule with this placement and backward pass has a shorter" in run(*words)
    words = ("simulate", "v-min", "--pp", "2", "-m", "4", "--certify", "0")
    assert "no schedule with this placement and backward pass has a makespan under" in run(*words)
    limited = run(*words, "--costs", "f=10,i=12,w=8,comm=1", "--memory-limit", "2")
    # A schedule within 2 microbatches exists: it repeats every 30 units of time.
    assert "no V within 2 microbatches" not in limited
    words = ("simulate", "v-min", "--pp", "8", "-m", "8", "--certify", "0")
    limited = run(*words, "--costs", "f=10,i=12,w=8,comm=1", "--memory-limit", "4")
    assert "no V within 4 microbatches repeats the passes of one microbatch every 30 or" in limited


HEAD = ("--costs", "f=10,i=12,w=8,comm=1,output_layer=10/12/8,embedding=1/2")


def test_simulate_divides_the_vocabulary(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    words = ("simulate", "zb-h1", "--pp", "4", "-m", "16", *HEAD)
    whole, variant_1, variant_2 = (
        json.loads(run(*words, "--vocab-parallel", how, "--perfetto", str(trace), "--json"))
        for how in ("none", "1", "2")
    )
    reports = (whole, variant_1, variant_2)
    assert [report["vocab_parallel"] for report in reports] == ["none", "1", "2"]
    assert max(variant_1["makespan"], variant_2["makespan"]) < 0.75 * whole["makespan"]
    assert [
        report["peak_activation_microbatches"][0] for report in (whole, variant_1, variant_2)
    ] == [4, 6, 5]
    # The embedding's two passes and the output layer's three are the same work, split over the
    # ranks.
    assert variant_1["work"] == variant_2["work"] == pytest.approx(whole["work"])
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"0S0", "3SW15", "0GATHER_S0"} <= names


@pytest.mark.search
def test_plan_compares_what_can_be_done_about_the_output_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only_families(monkeypatch, "1f1b", "zb-v")
    words = ("--memory-limit", "2")
    alone = json.loads(run("plan", "pp=2,m=4", *words, "--json"))["plan"]["candidates"]
    methods = {(row["vocab_parallel"], row["layers_moved"]) for row in alone}
    assert methods == {("none", False)}
    report = json.loads(run("plan", "pp=2,m=4,layers=7", *words, *HEAD, "--json"))
    rows = [row for row in report["plan"]["candidates"] if row["schedule"] == "1f1b"]
    row = {(made["vocab_parallel"], made["layers_moved"]): made["step"] for made in rows}
    assert row["none", True] < row["none", False]
    # Two ranks store two microbatches. A third is over the limit, so some activations are
    # recomputed.
    refused = ("simulate", "1f1b", "--pp", "2", "-m", "4", *words, *HEAD, "--vocab-parallel", "2")
    assert "least feasible limit for it is 3" in run(*refused, code=2)
    recomputing = json.loads(run(*refused, "--recompute", "fit", "--json"))["makespan"]
    assert row["2", False] == recomputing == 252


def test_a_picture_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    """`simulate` and `plan` refuse a picture's file name before they search for a schedule. They
    used to search first, and then refused the name."""
    simulate = ("simulate", "v-auto", "--pp", "64", "-m", "4096")
    for command in (simulate, ("plan", "pp=64,m=4096")):
        words = (*command, "--plot", str(tmp_path / "x.pdf"))
        assert "pictures are written as .svg or .png" in run(*words, code=2)


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
    ("spec", "more"),
    [
        ("zb-h1", "schedule 1F1B --parallelism"),
        ("zb-v", "schedule ZBVZeroBubble --parallelism"),
        ("interleaved:vpp=2", "schedule Interleaved1F1B --parallelism"),
        ("interleaved:vpp=3", "layers_per_stage such that there are 6 stages"),
        ("hanayo", "torchtitan cannot place the stages of a wave"),
    ],
)
def test_a_table_for_torch_comes_with_torchtitans_settings(
    spec: str, more: str, tmp_path: Path
) -> None:
    table = tmp_path / "x.csv"
    said = run("simulate", spec, "--pp", "2", "-m", "4", "--torch-csv", str(table))
    line = said.splitlines()[-1]
    assert more in line
    assert (f"schedule_csv {table} --parallelism.num_pp_microbatches 4" in line) is (
        spec != "hanayo"
    )
    assert len(from_csv(table.read_text(), "x").rows) == 2


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("simulate", "zb-h9", "--pp", "2", "-m", "2"), "did you mean zb-h1 or zb-h2? Known are"),
        (("simulate", "1f1b", "--pp", "4", "-m", "8", "--memory-limit", "3"), "0F3 brings rank 0"),
        (("simulate", "1f1b", "--pp", "4", "-m", "8", "--memory-limit", ""), "memory limit ''"),
        (("plan", "pp=4,m=8", "--memory-limit", ""), "memory limit ''"),
        # The error used to say that the limit should be raised to the least limit named in the
        # reasons, but no reason named one.
        (("plan", "pp=4,m=8", "--memory-limit", "1GiB"), "error: the memory limit is 1GiB, but"),
        (("simulate", "1f1b", "--pp", "4", "-m", "8", "--certify", "-5"), "'--certify'"),
        (("simulate", "1f1b", "--pp", "4", "-m", "8", "--certify", "nan"), "'--certify'"),
        (("simulate", "1f1b", "--pp", "4", "-m", "8", "--steps", "0"), "'--steps'"),
        (("simulate", "1f1b", "--pp", "4", "-m", "0"), "microbatches is 0"),
        (("simulate", "1f1b", "--pp", "0", "-m", "4"), "pipeline ranks is 0"),
        (("simulate", "1f1b", "--pp", "4", "-m", "8", "--costs", "f=1"), "i, w is missing"),
        (("simulate", "1f1b", "--pp", "4", "-m", "8", "--plot", "x.pdf"), ".svg or .png"),
        (("simulate", "1f1b", "--pp", "4", "-m", "8", "--costs", "no.json"), "cannot be read"),
        (("simulate", "1f1b", "--pp", "4", "-m", "8", "--costs", ""), "costs '' are empty"),
        (
            ("simulate", "1f1b", "--pp", "4", "-m", "8", "--csv", "no/x.csv"),
            "there is no folder no",
        ),
        (("simulate", "1f1b", "--pp", "4", "-m", "8", "--plot", "no/x.svg"), "is no folder no"),
        (("simulate", "plan", "--pp", "4", "-m", "8"), "in a launch, 'plan' chooses one"),
        (
            ("simulate", "1f1b", "--pp", "2", "-m", "2", "--vocab-parallel", "2", "--certify", "1"),
            "no lower bound for schedules with vocabulary parallelism 2",
        ),
        (
            ("simulate", "1f1b", "--pp", "2", "-m", "2", "--vocab-parallel", "1", "--csv", "x.csv"),
            "added a second time",
        ),
        (
            (
                "simulate",
                "1f1b",
                "--pp",
                "2",
                "-m",
                "2",
                "--recompute",
                "first:1",
                "--torch-csv",
                "x.csv",
            ),
            "torch.distributed.pipelining has no passes for --recompute",
        ),
        (("doctor", "--pipeline-memory-limit", "4"), "without --pipeline-schedule"),
        (("doctor", "--pipeline-schedule", "1f1b", "--pipeline-p2p", "fast"), "async or batched"),
    ],
)
def test_a_mistake_exits_2_and_says_why(words: tuple[str, ...], text: str) -> None:
    assert text in run(*words, code=2)


def test_doctor_with_no_flag_of_ours_says_whether_all_patches_fit() -> None:
    report = json.loads(run("doctor", "--json"))
    assert report["environment"]["megatron-core"].startswith("0.19")
    assert report["patches"] and {patch["state"] for patch in report["patches"]} == {"fits"}
    assert report["allow_unknown"] == ""
    count = len(report["patches"])
    text = run("doctor")
    assert text.index("torch") < text.index(f"all {count} patches of ours fit this Megatron")
    patches = run("doctor", "--patches")
    assert "fits: " not in text and patches.count("\nfits: ") == count
    assert "zb-h1" not in patches, "nobody has asked for it"


def test_doctor_takes_no_more_than_it_needs(tmp_path: Path) -> None:
    """`doctor` imports no module of torch's compiler. Their import used to take most of the
    command's time, although nothing is compiled."""

    def asked() -> None:
        for name in list(sys.modules):  # except for parts of torch, everything is imported anew
            if name.startswith(("megatron.", "torch._inductor")):
                del sys.modules[name]
        app(["doctor"], standalone_mode=False)
        assert "megatron.core.fusions.fused_bias_geglu" in sys.modules
        assert "torch._inductor.compile_fx" not in sys.modules

    log = tmp_path / "log"
    assert run_forked(asked, log) == 0, log.read_text()


def test_verify_takes_a_table_and_says_what_is_in_it(tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    table.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    for words in ((), ("--pp", "2"), ("--pp", "2", "-m", "2")):
        said = run("verify", str(table), *words)
        assert "is valid: 2 ranks, 2 stages, 2 microbatches; a rank holds at most 2 micro" in said
        assert "in order: training gives stock Megatron's numbers to the last bit" in said
    table.write_text("0F0,0F1,0B1,0B0\n")
    said = run("verify", str(table))
    assert "is valid: 1 rank, 1 stage, 2 microbatches" in said and "out of order" in said


def test_verify_demands_one_order_of_the_data(tmp_path: Path) -> None:
    """`verify` requires one order of microbatches on all stages. A table with two orders used to be
    called valid, and its training learned nothing, because labels belonged to other inputs."""
    table = tmp_path / "mine.csv"
    forwards = ",".join(f"0F{k}" for k in range(8)) + "," + ",".join(f"0B{7 - k}" for k in range(8))
    turns = ",".join(f"1F{7 - k},1B{7 - k}" for k in range(8))
    table.write_text(f"{forwards}\n{turns}\n")
    said = run("verify", str(table), code=2)
    assert "1F7 is the forward number 1 of stage 1, and 0F0 is" in said
    assert "give all stages one order of forward passes" in said
    table.write_text("0F1,0F0,0B0,0B1\n1F1,1B1,1F0,1B0\n")
    assert "in one order, so inputs and labels match" in run("verify", str(table))


def test_verify_takes_a_family_in_python(tmp_path: Path) -> None:
    """`verify` accepts a Python file with a schedule family. It used to read the file as a table,
    and refused its first line."""
    file = tmp_path / "mine.py"
    file.write_text(
        "from megatron_ext.families import Action, Kind, Schedule, family, line\n"
        "@family('mine', line, source='ours')\n"
        "def mine(problem, *, again: bool = False):\n"
        "    rows = []\n"
        "    for rank in range(problem.ranks):\n"
        "        passes = [Action(rank, k, m) for k in 'FB' for m in range(problem.microbatches)]\n"
        "        rows.append((*passes, *passes[:again]))\n"
        "    rows = [[Action(a.stage, Kind(a.kind), a.microbatch) for a in row] for row in rows]\n"
        "    return Schedule('mine', problem.placement, tuple(map(tuple, rows)))\n"
    )
    said = run("verify", str(file), "--pp", "3", "-m", "4")
    assert "mine.py is valid: 3 ranks, 3 stages, 4 microbatches; a rank holds at most 4" in said
    assert "add --pp P and -m M" in run("verify", str(file), code=2)
    said = run("verify", f"{file}:again=true", "--pp", "2", "-m", "2", code=2)
    assert "0F0 does the forward a second time" in said


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--pp", "3"), "is for 2 ranks, with a row for each, and the pipeline has 3"),
        (("-m", "5"), "is for 1 microbatch, and this step has 5"),
        (("-m", "0"), "microbatches is 0"),
    ],
)
def test_verify_compares_a_table_with_the_launch(
    words: tuple[str, ...], text: str, tmp_path: Path
) -> None:
    table = tmp_path / "mine.csv"
    table.write_text("0F0,0B0\n1F0,1B0\n")
    assert text in run("verify", str(table), *words, code=2)


def test_verify_bounds_a_typo_before_it_takes_memory(tmp_path: Path) -> None:
    """`verify` refuses a mistyped microbatch number before it takes memory. With 999999999999
    microbatches the command used to take all memory, and the system killed it without a message."""
    table = tmp_path / "mine.csv"
    table.write_text("0F0,0F1,0B0,0B999999999999\n")
    run_it = "from megatron_ext.cli import app; app()"
    command = f"ulimit -v 2000000; exec {sys.executable} -c '{run_it}' verify {table}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "line 1: 0B999999999999 is of microbatch 999999999999, but no" in done.stderr


def test_doctor_shows_what_a_flag_would_apply() -> None:
    report = json.loads(run("doctor", "--json", "--pipeline-schedule", "1f1b"))
    states = {patch["feature"]: patch["state"] for patch in report["patches"]}
    assert states["schedule"] == states["flags"] == "would be applied"
    assert states["split backward of local linear layers"] == "fits"
    assert all(patch["reason"] and patch["target"] for patch in report["patches"])
    required = sum(patch["is_required"] for patch in report["patches"])
    text = f"all {required} patches that --pipeline-schedule 1f1b needs fit this Megatron"
    assert text in run("doctor", "--pipeline-schedule", "1f1b")


def test_doctor_knows_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    assert json.loads(run("doctor", "--json"))["environment"]["ROCm"].startswith("6.4.1: untried")


def test_doctor_says_what_is_missing_without_our_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_ext.launch.doctor import doctor

    assert "numba" not in json.loads(run("doctor", "--json"))["environment"]
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    told = run("doctor")
    slow = "not installed: searches are about 30 times slower"
    assert slow in " ".join(told.partition("\n\n")[0].split())
    environment = json.loads(run("doctor", "--json"))["environment"]
    assert environment["numba"].endswith("pip install 'megatron_ext[search]'")
    assert {"ortools", "matplotlib"} <= environment.keys()


def test_a_whole_program_is_written_for_others_to_check(tmp_path: Path) -> None:
    """`simulate --program` writes the whole program for other tools to check: each rank's row with
    its messages and waits, in the text form that `parse_action` reads."""
    file = tmp_path / "rows.txt"
    options = ["--pp", "2", "-m", "2", "--program", str(file)]
    answer = json.loads(run("simulate", "1f1b", *options, "--json"))
    assert answer["makespan_if_passes_wait"] >= answer["makespan"]
    rows = [list(map(parse_action, line.split(","))) for line in file.read_text().splitlines()]
    assert rows == [list(row) for row in program("1f1b", line_problem(2, 2)).schedule.rows]


def test_names_and_figures_stay_whole_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tables keep names and numbers on one line in a narrow terminal. `plan` used to break
    "breadth-first" into "breadth-fir" and "st", and "experimental" into "experiment" and "al"."""
    only_families(monkeypatch, "1f1b", "breadth-first", "zb-v")
    terminal = {"FORCE_COLOR": "1", "TERM": "dumb", "COLUMNS": "80", "LINES": "50"}
    plan = (
        "plan",
        "--all",
        "pp=2,m=4",
        "--costs",
        "f=10,i=12,w=8,comm=1,output_layer=1/1/1",
    )
    printed = runner.invoke(app, plan, env=terminal).stdout
    assert re.search(r"^breadth-first .*\d\.\d% ", printed, re.MULTILINE)
    listed = runner.invoke(app, ["schedules"], env=terminal).stdout
    assert re.search(r"^breadth-first .*loop ", listed, re.MULTILINE)
    assert max(map(len, listed.splitlines())) <= 80, "sentences go on in the next line"


@pytest.mark.parametrize("command", ["", "doctor", "verify", "parity", "parity record"])
def test_help_is_behind_its_short_flag_too_and_types_no_switch(command: str) -> None:
    """Every command prints its help for ``-h`` as for ``--help``, and the help shows no type for a
    switch. ``-h`` used to give "No such option", or was read as a word of the launch command, and
    the help showed a ``<bool>`` behind each switch."""
    short, whole = (runner.invoke(app, [*command.split(), flag]) for flag in ("-h", "--help"))
    assert short.exit_code == 0 and short.output == whole.output
    assert "Show this message and exit" in short.output
    assert "bool" not in short.output.lower()


def test_completion_can_be_installed() -> None:
    assert "--install-completion" in runner.invoke(app, ["--help"]).output
