"""Tests that a command takes only as much memory as it needs of a file, whatever the file's
size."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_ext.recordings.run_recording import read_recording
from megatron_ext.schedule.microbatch_costs import BatchSize, read_loads
from tests.helpers.limited import MOST_BYTES, MOST_SECONDS, Ended, run_limited
from tests.helpers.recordings import Course, write

SIMULATE = ["simulate", "1f1b", "--pp", "2", "-m", "4"]


def refused(ended: Ended, *words: str) -> None:
    """Assert that the command ended soon, with one line that contains ``words``."""
    assert ended.status == 2, ended
    (line,) = ended.output.splitlines()
    assert line.startswith("megatron-ext: error: ") and all(word in line for word in words), line
    assert ended.grown < MOST_BYTES and ended.seconds < MOST_SECONDS, ended


@pytest.mark.parametrize("line", ["512 1024 2048 512\n", "4096\n", "1 " * 1000])
def test_microbatch_costs_are_limited(line: str, tmp_path: Path) -> None:
    """A file of --microbatch-costs is refused above 32 MiB, or with a line of more than a million
    characters. A file of 60 MB used to take more than 4 GB of memory."""
    lengths = tmp_path / "lengths.txt"
    lengths.write_text(line * (60_000_000 // len(line)))
    ended = run_limited([*SIMULATE, "--microbatch-costs", "lengths.txt"], tmp_path)
    refused(ended, "microbatch costs lengths.txt have 57.2 MiB", "at most 32 MiB")
    lengths.write_text(line * (2_000_000 // len(line)) if "\n" in line else "1 " * 2**20)
    if "\n" in line:
        loads = read_loads(lengths, BatchSize(1000))
        assert loads.tokens.shape == (2_000_000 // len(line) // 1000, 1000)
    else:
        with pytest.raises(
            ValueError, match=r"line 1: the line has more than 1,048,576 characters"
        ):
            read_loads(lengths, BatchSize(1))


def test_a_recording_is_read_line_by_line(tmp_path: Path) -> None:
    """`parity compare` reads a recording line by line, and refuses a line of more than 64 MiB. It
    used to read a rank's 3 GB at once, and split them into as many texts."""
    folder = write(tmp_path / "A", Course())
    lines = folder / "rank-00000.jsonl"
    text = lines.read_text()
    os.truncate(lines, 3_000_000_000)
    ended = run_limited(["parity", "compare", "A", "A"], tmp_path)
    refused(ended, f"A/{lines.name}, line {text.count(chr(10)) + 1}: the line has more than 64 MiB")
    lines.write_text(text)
    assert len(read_recording(folder).trained) == 3


@pytest.mark.parametrize("option", ["--costs", "plan"])
def test_json_is_limited(option: str, tmp_path: Path) -> None:
    """JSON files of more than 32 MiB are refused, because values read from JSON take many times the
    bytes of their text."""
    (tmp_path / "large.json").write_text("[" + "[]," * 20_000_000 + "0]")
    words = [*SIMULATE, "--costs"] if option == "--costs" else ["plan"]
    refused(run_limited([*words, "large.json"], tmp_path), "large.json has more than 32 MiB")
