"""Tests of values that are too small or too large, and of mistakes in a user's code: a command ends
in one line that names them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_ext.cli import app

SIMULATE = ("simulate", "{}", "--pp", "2", "-m", "4", "--costs")
MODEL = "layers=4,hidden=64,heads=4,sequence=64,vocabulary=100"
FAMILY = """
from megatron_ext.families import family, fill_best, line
@family("mine", line, source="")
def mine(problem):
    {}
"""


def refused(*words: str) -> str:
    """Run a command that must be refused, and return the one line in which it ends."""
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == 2, (ended.output, ended.exception)
    (line,) = ended.output.splitlines()
    assert line.startswith("megatron-ext: error: ")
    return line


@pytest.mark.parametrize("spec", ["1f1b", "zb-h1", "v-auto"])
@pytest.mark.parametrize("costs", ["f=1,i=1,w=1e-300,comm=1", "f=1e-300,i=1,w=1,comm=1e17"])
def test_a_cost_that_is_nearly_nothing_is_refused(spec: str, costs: str) -> None:
    """Costs such as 1e-300 are refused, and 0 is accepted. Ratios of costs used to become infinite,
    and an OverflowError ended the command."""
    line = refused(*(word.format(spec) for word in SIMULATE), costs)
    assert f"costs {costs}: 1e-300 is too small; write 0, or costs of at least 1e-18" in line
    costs = costs.replace("1e-300", "0").replace("1e17", "1")
    words = [*(word.format(spec) for word in SIMULATE), costs]
    assert CliRunner().invoke(app, words).exit_code == 0


@pytest.mark.parametrize("costs", ["f=1,i=1,w=1,comm=1e12", "f=1e-18,i=1e-18,w=1e-18,comm=1"])
def test_a_search_refuses_messages_that_it_cannot_count(costs: str) -> None:
    """A search refuses messages that take very many times as long as a pass. It counts start times
    in whole numbers of 32 bits, and numpy used to raise OverflowError beyond them."""
    words = [word.format("v-auto") for word in SIMULATE]
    assert "times as long as the passes of a microbatch on a rank" in refused(*words, costs)
    words[1] = "zb-h1"
    assert CliRunner().invoke(app, [*words, costs]).exit_code == 0


@pytest.mark.parametrize("gpu", ["operations=1e-300,bytes=1", "operations=1,bytes=1e-300"])
def test_a_gpu_that_computes_nothing_is_refused(gpu: str) -> None:
    """`plan` refuses a --gpu with nearly no operations or bytes a second. Estimated times used to
    become infinite, and an IndexError ended the plan."""
    line = refused("plan", "--gpu", gpu, f"pp=2,m=4,{MODEL}")
    assert f"GPU {gpu!r}: operations, bytes, host and peers have to be at least 1" in line


@pytest.mark.parametrize("length", ["1e200", "1e308", "1e-400", "1e999"])
def test_a_length_without_a_square_is_refused(length: str, tmp_path: Path) -> None:
    """A document length is refused if its square overflows."""
    (tmp_path / "lengths").write_text(f"512\n{length}\n512\n512\n")
    path = str(tmp_path / "lengths")
    line = refused("simulate", "1f1b", "--pp", "2", "-m", "4", "--microbatch-costs", path)
    assert f"{path}, line 2: {length!r} is no positive number below 1e+100" in line


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ('return int("x")', "ValueError: invalid literal for int() with base 10: 'x'"),
        ("raise ValueError", "ValueError"),
        ("a, b = problem.microbatches,", "ValueError: not enough values to unpack"),
        ("assert not problem", "AssertionError"),
    ],
)
def test_a_mistake_in_a_family_names_file_and_line(code: str, why: str, tmp_path: Path) -> None:
    """A mistake in a user's schedule family is reported with file and line. An unintended
    ValueError used to be printed like a refusal: as its bare text, or as nothing."""
    path = tmp_path / "mine.py"
    path.write_text(FAMILY.format(code))
    line = refused("simulate", str(path), "--pp", "2", "-m", "4")
    failed = "mine fails for 2 ranks and 4 microbatches"
    assert line.startswith(f"megatron-ext: error: schedule file {path}, line 5: {failed}: {why}")


@pytest.mark.parametrize(
    "code",
    [
        'raise ValueError("mine takes an even number")',
        'raise ValueError(\n        "mine takes "\n        "an even number"\n    )',
        'problem.ranks > 5 or helper("mine takes an even number")',
    ],
)
def test_a_refusal_of_a_family_stays_as_it_is(code: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    helper = "def helper(text): raise ValueError(text)\n"
    path.write_text(f"{helper}{FAMILY.format(code)}")
    line = refused("simulate", str(path), "--pp", "2", "-m", "4")
    assert line == "megatron-ext: error: mine takes an even number"
