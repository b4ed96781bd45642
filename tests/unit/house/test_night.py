"""Tests of the nightly test run: its pieces, the lines that it adds to its record, and the checks
of that record."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.night import record
from tests.night.__main__ import lines_of, piece_of
from tests.night.drawn import SOURCES, drawn, lacking
from tests.night.pieces import COMMANDS, deal, night_cases, night_files, pieces_of
from tests.night.record import NightLine, parse, problems

GREEN = NightLine("tests/test_a.py", "12345678", 70, 5, 0, {"needs two GPUs": 2})


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (GREEN, []),
        (replace(GREEN, passed=4, failed=1), ["tests/test_a.py: 1 failed at 12345678"]),
        (replace(GREEN, passed=3), ["tests/test_a.py: 5 cases at 12345678, 7 now"]),
        (
            replace(GREEN, skipped={"einops 0.8 cannot be fetched with pip: 404": 2}),
            ["tests/test_a.py: skipped, einops 0.8 cannot be fetched with pip: 404"],
        ),
        (
            replace(GREEN, name="tests/test_b.py"),
            [
                "tests/test_a.py: no line",
                "tests/test_b.py: a line, and no night cases",
            ],
        ),
    ],
)
def test_what_is_wrong_with_a_record(line: NightLine, told: list[str]) -> None:
    assert problems({line.name: line}, {"tests/test_a.py": 7}) == told


def test_a_record_is_written_and_read(tmp_path: Path) -> None:
    file = tmp_path / "night.txt"
    record.write([GREEN, replace(GREEN, name="tests/test_b.py", skipped={})], file)
    record.write([replace(GREEN, failed=2)], file)
    assert record.read(file) == {
        "tests/test_a.py": replace(GREEN, failed=2),
        "tests/test_b.py": replace(GREEN, name="tests/test_b.py", skipped={}),
    }
    assert parse(str(GREEN)) == GREEN


RESULTS = """<testsuites><testsuite>
<testcase file="tests/test_a.py" name="one" time="1.5"/>
<testcase file="tests/test_a.py" name="two" time="2"><failure message="no"/></testcase>
<testcase file="tests/test_a.py" name="c" time="0"><skipped message="needs a; | GPU"/></testcase>
</testsuite></testsuites>"""


def test_lines_are_of_pytests_results() -> None:
    first, second = lines_of(RESULTS, ["tests/test_a.py", "tests/test_b.py"], "abc")
    assert first == NightLine("tests/test_a.py", "abc", 4, 1, 1, {"needs a, / GPU": 1})
    assert second.failed, "a file without results"
    assert [parse(str(line)) for line in (first, second)] == [first, second]


def test_pieces_take_about_the_same_time() -> None:
    seconds = {"a": 100.0, "b": 60.0, "c": 50.0, "d": 10.0}
    assert deal(seconds, 2) == [["a", "d"], ["b", "c"]]
    commands = [[name] for name in COMMANDS]
    assert pieces_of(seconds, seconds, 6) == [["a", "d"], ["b", "c"], *commands]
    (whole,) = pieces_of(seconds, seconds, 1)
    assert sorted(whole) == sorted([*seconds, *COMMANDS])


def test_recorded_nights_are_green() -> None:
    """Each test file in the record of nightly runs has passed there, with as many cases as it has
    today. Files without a line in the record are not checked."""
    lines = record.read()
    cases = night_cases([name for name in night_files() if name in lines])
    assert problems(lines, dict.fromkeys(lines.keys() & COMMANDS, 1) | cases) == []


def test_what_runs_is_a_piece_or_files_of_the_night() -> None:
    files = ["tests/pipeline/training/test_matrix.py", COMMANDS[0]]
    assert piece_of(files) == files
    assert set(piece_of(["1/1"])) == {*night_files(), *COMMANDS}
    for words in ([], ["2/1"], ["0/1"], ["1"], ["tests/unit/schedule/test_action.py"]):
        assert piece_of(words) == []


def test_each_commit_draws_another_part_of_the_night() -> None:
    seconds = {f"test_{n}.py": 60.0 for n in range(12)}
    parts = [list(drawn(seconds, commit, 180.0)) for commit in ("a1", "b2", "c3", "d4")]
    assert all(len(set(part)) == 3 for part in parts)
    assert len({tuple(part) for part in parts}) == 4
    assert list(drawn(seconds, "a1", 180.0)) == parts[0]


def test_files_whose_sources_are_not_here_are_left_out(tmp_path: Path) -> None:
    here, away = tmp_path, tmp_path / "away"
    text = (record.RECORD.parents[1] / "pipeline/callers/test_nemo_rl.py").read_text()
    assert lacking(text, dict.fromkeys(SOURCES, here) | {"nemo_rl_checkout": away}) == away
    assert lacking(text, dict.fromkeys(SOURCES, away) | {"nemo_rl_checkout": here}) is None


def test_a_night_has_each_file_with_night_cases() -> None:
    files = night_files()
    assert "tests/pipeline/training/test_megatrons_own.py" in files
    assert "tests/unit/schedule/test_action.py" not in files
    few = ["tests/unit/search/test_patterns.py"]
    assert night_cases(few)[few[0]] > 2
