"""Tests of a user's Python file as a schedule, and of the examples in docs/your-own-schedule.md."""

from __future__ import annotations

import json
import operator
import re
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_ext.base.progress import reporting
from megatron_ext.cli import app
from megatron_ext.compile import others_code
from megatron_ext.compile.build import build_program
from megatron_ext.compile.registry import choose, entries
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.schedule import bitwise_order
from megatron_ext.schedule.schedule_csv import KINDS_IN_FILES
from megatron_ext.written_settings import from_argv
from tests.helpers.reference_runs import runs_to_end
from tests.helpers.schedules import line_problem, program

PAGE = Path(__file__).resolve().parents[3] / "docs" / "your-own-schedule.md"
EXAMPLES = {
    block.splitlines()[0].removeprefix("# "): block
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
}
COSTS = (10, 12, 8, 5)  # costs of the examples on the page


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a working directory that contains the page's examples, and return it."""
    for name, text in EXAMPLES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == code, result.output
    return result.output if code else result.stdout


def test_the_page_has_its_examples() -> None:
    assert list(EXAMPLES) == ["my_schedule.py", "my_split_schedule.py"]


def test_the_page_names_what_a_family_gets() -> None:
    """The page about own schedules names the attributes that a family gets, and they exist. For
    post-validation, now in `Problem.options`, the page used to name a place where it had been
    before."""
    page, problem = PAGE.read_text(), line_problem(2, 2)
    _, _, given = page.partition("## What a family gets and returns")
    cells = re.findall(r"^\| (`.*?) \|", given.partition("`Schedule(")[0], re.MULTILINE)
    names = [name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)]
    assert "microbatches" in names
    for name in [*names, *re.findall(r"\bproblem\.([\w.]+)", page)]:
        operator.attrgetter(name)(problem)


def test_the_page_names_the_kinds_that_one_may_write() -> None:
    """The page about own schedules names the kinds of actions that a user may write. Users used to
    have to look up names and letters in the code."""
    rows = re.findall(r"^\| `Kind\.(\w+)` \| `(\w)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert [letter for _, letter, _ in rows] == [*KINDS_IN_FILES]
    for name, letter, does in rows:
        assert Kind[name] == letter and does.startswith(KINDS_IN_FILES[Kind(letter)])


@pytest.mark.parametrize(
    ("spec", "makespan", "peak"),
    [
        ("my_schedule.py", 1240, 15),
        ("my_schedule.py:ahead=1.5", 1390, 11),
        ("my_schedule.py:ahead=1", 1510, 8),
        ("my_split_schedule.py", 1238, 8),
        ("my_split_schedule.py:ahead=1.5", 1142, 11),
    ],
)
def test_figures_of_the_page(spec: str, makespan: float, peak: float, folder: Path) -> None:
    words = ["simulate", spec, "--pp", "8", "-m", "32", "--costs", "f=10,i=12,w=8,comm=5"]
    result = json.loads(run(*words, "--json"))
    assert result["schedule"] == spec
    assert result["makespan"] == makespan
    assert max(result["peak_activation_microbatches"]) == peak
    assert f"{makespan}" in PAGE.read_text()


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("p", [1, 2, 3, 8])
def test_examples_are_proved_at_every_size(name: str, p: int, folder: Path) -> None:
    for m in (1, p, 2 * p + 1):
        problem = line_problem(p, m, *COSTS)
        schedule = program(name, problem).schedule
        assert runs_to_end(schedule, problem)
        assert bitwise_order(schedule)
        program(name, line_problem(p, m, *COSTS, forward_only=True))


def test_the_first_example_with_ahead_1_is_1f1b(folder: Path) -> None:
    problem = line_problem(4, 8)
    assert program("my_schedule.py:ahead=1", problem).digest == program("1f1b", problem).digest


def test_a_limit_reaches_the_file(folder: Path) -> None:
    from_file = choose("my_schedule.py")
    with pytest.raises(ValueError, match="memory limit"):
        build_program(from_file, line_problem(4, 8, limit="4"))
    build_program(choose("my_schedule.py:ahead=1"), line_problem(4, 8, limit="4"))


def test_certificate_and_table(folder: Path) -> None:
    words = ("simulate", "my_schedule.py", "--pp", "2", "-m", "3")
    result = json.loads(run(*words, "--csv", "own.csv", "--certify", "1", "--json"))
    assert result["lower_bound"] <= result["makespan"]
    table = json.loads(run("simulate", "own.csv", "--pp", "2", "-m", "3", "--json"))
    assert table["makespan"] == result["makespan"]


def test_the_flag_of_a_training_run_takes_a_file(folder: Path) -> None:
    config = from_argv(["--pipeline-schedule", "my_split_schedule.py:ahead=2", "--lr", "1"])
    assert config.resolved_spec.traits.splits_backward
    assert not from_argv(
        ["--pipeline-schedule", "my_schedule.py"]
    ).resolved_spec.traits.splits_backward


def test_a_file_is_imported_once_and_does_not_join_ours(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    counted = (
        "from pathlib import Path\nwith Path(__file__ + '.log').open('a') as f: f.write('x')\n"
    )
    path.write_text(EXAMPLES["my_schedule.py"] + counted)
    for spec in (str(path), f"{path}:ahead=1", str(tmp_path / "." / "own.py")):
        choose(spec).build(line_problem(2, 2))
    assert Path(f"{path}.log").read_text() == "x"
    assert "eager-1f1b" not in entries()
    with pytest.raises(ValueError, match="no schedule 'eager-1f1b'"):
        choose("eager-1f1b")


def test_two_files_may_use_one_name(tmp_path: Path) -> None:
    for name in ("one.py", "two.py"):
        (tmp_path / name).write_text(EXAMPLES["my_schedule.py"])
        assert choose(str(tmp_path / name)).build(line_problem(2, 2)).name == "eager-1f1b"
    assert choose(str(tmp_path / "one.py")).build is not choose(str(tmp_path / "two.py")).build


def test_a_file_that_has_been_put_right_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("x = 1\n")
    with pytest.raises(ValueError, match="registers 0 families"):
        choose(str(path))
    path.write_text(EXAMPLES["my_schedule.py"])
    choose(str(path))


def test_a_file_may_use_a_dataclass_and_families_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from megatron_ext.schedule_families.line import one_forward_one_backward\n"
        "from megatron_ext.schedule.placement import line\n"
        "from megatron_ext.compile.registry import family\n"
        "@dataclass\n"
        "class Settings:\n"
        "    ahead: int = 1\n"
        "@family('same', line, source='ours')\n"
        "def same(problem):\n"
        "    return one_forward_one_backward(problem)\n"
    )
    assert choose(str(path)).build(line_problem(2, 2)).rows


IMPORTS = (
    "from megatron_ext.schedule.placement import line\n"
    "from megatron_ext.compile.registry import family\n"
)
OWN = (
    "from megatron_ext.families import Action, Schedule, family, line\n"
    "@family('a', line, source='ours')\n"
    "def a(problem): return Schedule('a', problem.placement, {})\n"
)
PLACED = (
    "from megatron_ext.families import Placement, family\n"
    "@family('a', lambda ranks: Placement('own', {}), source='ours')\n"
    "def a(problem): return problem\n"
)
EAGER = EXAMPLES["my_schedule.py"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\nimport nothing_of_the_kind\n", r"own.py, line 2 cannot be imported: ModuleNotFound"),
        ("x = (\n", r"own.py cannot be imported: SyntaxError.*line 1"),
        (
            IMPORTS + "@family('a', line)\ndef a(problem): return problem\n",
            "line 3 cannot be imported: TypeError.*'source'",
        ),
        (
            IMPORTS
            + "@family('a', line, source='ours', split_backward=True)\ndef a(p): return p\n",
            "line 3 cannot be imported: TypeError.* no trait split_backward; did you mean splits_",
        ),
        ("x = 1\n", r"own.py registers 0 families \(none\).*decorate exactly one function"),
        (
            EAGER + "\n@family('two', line, source='ours')\ndef two(problem): return problem\n",
            r"registers 2 families \(eager-1f1b, two\)",
        ),
        (EAGER.replace('@family("eager-1f1b"', '@family("zb-h1"'), "'zb-h1', which is a schedule"),
        (EAGER.replace('@family("eager-1f1b"', '@family("Schedule1F1B"'), "give it another name"),
        (
            IMPORTS + "@family('a', line, source='ours')\ndef a(problem, *, g): return g\n",
            "option g has no default",
        ),
        (
            IMPORTS + "@family('a', line, source='ours')\ndef a(problem): return None\n",
            "a returned NoneType; return a Schedule",
        ),
        (
            EAGER.replace("FULL_BACKWARD", "BACKWARD_INPUT"),
            r"makes \d+I0, .*write @family\(..., splits_backward=True\)",
        ),
        (
            IMPORTS + "from megatron_ext.families import Schedule\n"
            "@family('a', line, source='ours')\n"
            "def a(problem): return Schedule('a', problem.placement, (((0, 'F', 0),),))\n",
            r"a has \(0, 'F', 0\) in its rows, which is no Action",
        ),
        (OWN.format("(((Action(0, 'X', 0)),),)"), r"kind='X'.* in its rows, which is no Action"),
        (OWN.format("((Action(0, 'F', 0.5),),)"), "no Action.* of kind F, I, W, B"),
        (OWN.format("None"), r"own\.py: a fails for 2 ranks and 2 microbatches: TypeError"),
        (OWN.format("1 / 0"), r"own\.py, line 3: a fails for 2 .*: ZeroDivisionError: division by"),
        # `exit` used to end the command without a message, with the status that the file gave.
        ("import sys; sys.exit(7)\n", r"own\.py, line 1 cannot be imported: SystemExit: 7"),
        (OWN.format("exit(0)"), r"own\.py, line 3: a fails for 2 .*: SystemExit: 0"),
        (
            OWN.replace("line, s", "lambda n: exit(), s"),
            r"line 2: the placement of a fails for 2 r",
        ),
        (OWN.replace("line, s", "lambda n: 1 / 0, s"), r"of a fails for 2 ranks: ZeroDivisionErr"),
        (OWN.replace("line, s", "3, s"), "registers a with something that is no function: 3"),
        (
            OWN.replace("line, s", "range, s"),
            "registers a with something that is no function: no signature",
        ),
        (OWN.format("(), 'x'"), "a has 'x' among its overlapped passes"),
        (OWN.replace("problem.placement", "None").format("()"), "a has None for a placement"),
        (OWN.format("((Action(10**12, 'F', 0),),)"), "no Action.* of kind F, I, W, B"),
        (PLACED.format("(0, 999999999999)"), "for 2 ranks is wrong about rank 1: each rank"),
        (PLACED.format("(0, 1, 2)"), "for 2 ranks is wrong about rank 2: each rank"),
        (
            PLACED.replace("Placement('own', {})", "None"),
            "the placement of a returned NoneType; return a Placement",
        ),
    ],
    ids=[
        "raises",
        "syntax",
        "no source",
        "no trait",
        "none",
        "several",
        "our name",
        "our alias",
        "no default",
        "no schedule",
        "not split",
        "no actions",
        "no kind",
        "no number",
        "no rows",
        "fails",
        "exits",
        "family exits",
        "placement exits",
        "placement fails",
        "placement is a number",
        "placement has no signature",
        "no pairs",
        "no placement in the schedule",
        "a number beyond 32 bits",
        "a rank that takes all memory",
        "a rank too many",
        "no placement",
    ],
)
def test_bad_files(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        resolved = choose(str(path))
        resolved.place(2)
        resolved.build(line_problem(2, 2))
    choose("1f1b").build(line_problem(2, 2))  # this project's families work as before


def test_rows_of_any_sort_are_rows(tmp_path: Path) -> None:
    """The rows of a user's family may be of any iterable type.

    Rows that were generators used to be empty when they were read a second time. Kinds that were
    strings compared equal to members of `Kind`, but comparisons with `is` did not find them.
    """
    path = tmp_path / "own.py"
    rows = "((Action(r, k, 0) for k in 'FB') for r in range(2))"
    path.write_text(OWN.format(rows))
    resolved, problem = choose(str(path)), line_problem(2, 1)
    assert resolved.build(problem).rows == program("1f1b", problem).schedule.compute_rows
    assert all(type(a.kind) is Kind for row in resolved.build(problem).rows for a in row)


LOOP = "while True:\n    try: pass\n    except Exception: pass\n"


@pytest.mark.parametrize("where", ["import", "placement", "family", "search"])
def test_a_loop_without_an_end(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's family that loops forever is stopped at a time limit. The command used to hang
    without a message."""
    monkeypatch.setattr(others_code, "LONGEST", 0.3)
    rings: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: rings.append(number))
    timer = signal.setitimer(signal.ITIMER_REAL, 100)  # a timer that other code has set
    path = tmp_path / "own.py"
    body = "def loop(*given):\n    " + LOOP.replace("\n", "\n    ") + "\n" + OWN.format("()")
    text = {
        "import": LOOP,
        "placement": body.replace("line, s", "loop, s"),
        "family": body.replace("return", "loop(); return"),
        "search": "import time\n"
        + OWN.format("()")
        .replace("'ours'", "'ours', searches=True")
        .replace("return", "time.sleep(0.5); return"),
    }
    path.write_text(text[where])
    told: list[str] = []
    try:
        with reporting(told.append, first=0.1, every=0.1):
            if where == "search":
                assert choose(str(path)).build(line_problem(2, 2)).rows == ()
            else:
                with pytest.raises(ValueError, match=r"own\.py: .* takes more than 0 s: it may be"):
                    resolved = choose(str(path))
                    resolved.place(2)
                    resolved.build(line_problem(2, 2))
        assert told and not rings
        # the timer of other code still runs
        assert 60 < signal.getitimer(signal.ITIMER_REAL)[0] < 100
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def test_no_such_file_says_from_where(folder: Path) -> None:
    message = run("simulate", "mine.py", "--pp", "2", "-m", "2", code=2)
    assert "there is no schedule file mine.py" in message
    assert str(folder) in message.replace("\n", "")


@pytest.mark.parametrize("option", ["behind=1", "ahead=far"])
def test_a_wrong_option_is_refused(option: str, folder: Path) -> None:
    with pytest.raises(ValueError, match="ahead"):
        choose(f"my_schedule.py:{option}")
