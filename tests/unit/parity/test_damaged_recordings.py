"""Tests of recordings that were damaged, cut off or mixed up, in comparisons by `megatron-ext
parity`.

Of 70 recordings with one change each, 15 used to end the comparison in a traceback. If all digests
of one run were missing, the verdict was "the same to the last bit".
"""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_ext.cli import app
from megatron_ext.recordings import comparison_text
from megatron_ext.recordings.compare import ParityVerdict, compare_runs
from megatron_ext.recordings.run_recording import RunRecording, read_recording
from tests.helpers.recordings import Course, write

SEEDS, CHANGES = 6, 60
STRANGE: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 1 << 40, 1 << 70, 10**400, 1.5, 1e308, float("nan")),
    *(
        float("inf"),
        "",
        "1",
        "x" * 500,
        [],
        [1],
        {},
        {"0": 1},
        [[0]],
        "float32",
        "optimizer.state.",
    ),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths to ``value`` and to everything that it contains."""
    yield path
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from places(inner, (*path, key))


def change_a_value(lines: list[bytes], rng: random.Random) -> None:
    at = rng.randrange(len(lines))
    data = json.loads(lines[at])
    *outer, last = rng.choice([path for path in places(data) if path])
    owner = data
    for key in outer:
        owner = owner[key]
    how = rng.randrange(3)
    if how == 0:
        owner[last] = copy.deepcopy(rng.choice(STRANGE))
    elif how == 1:
        del owner[last]
    elif isinstance(owner, list):
        owner.append(copy.deepcopy(owner[last]))
    else:
        owner[rng.choice(["0", "1", "norm", "x"])] = copy.deepcopy(owner[last])
    lines[at] = json.dumps(data).encode()


def empty_a_container(lines: list[bytes], rng: random.Random) -> None:
    """Empty one kind of entry in all lines that have it: digests, losses, tensors, pieces or
    arguments."""
    name = rng.choice(["digests", "losses", "tensors", "pieces", "arguments"])
    for at, line in enumerate(lines):
        data = json.loads(line)
        if name in data:
            lines[at] = json.dumps(data | {name: type(data[name])()}).encode()


def change_the_lines(lines: list[bytes], rng: random.Random) -> None:
    at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    how = rng.randrange(5)
    if how == 0:
        del lines[at]
    elif how == 1:
        lines.insert(other, lines[at])
    elif how == 2:
        lines[at], lines[other] = lines[other], lines[at]
    elif how == 3:
        lines[at:] = [lines[at][: rng.randrange(len(lines[at]) + 1)]]
    else:
        lines[at] = rng.choice(
            [b"\xff\xfe", b"", b"null", b"7", b"[" * 9**5, b"{}", b'{"a": 1', b"\0"]
        )


def change_bytes(lines: list[bytes], rng: random.Random) -> None:
    at = rng.randrange(len(lines))
    line = bytearray(lines[at])
    line[rng.randrange(len(line))] = rng.randrange(256)
    lines[at] = bytes(line)


def change_files(folder: Path, rng: random.Random) -> None:
    lines, data = folder / "rank-00001.jsonl", folder / "rank-00001.bin"
    how = rng.randrange(6)
    if how == 0:
        data.unlink()
    elif how == 1:
        data.write_bytes(data.read_bytes()[: rng.randrange(data.stat().st_size)])
    elif how == 2:
        lines.unlink()
    elif how == 3:
        shutil.copy(folder / "rank-00000.jsonl", lines)
    elif how == 4:
        lines.write_bytes(b"")
    else:
        lines.unlink()
        lines.mkdir()


CHANGE_LINES: tuple[Callable[[list[bytes], random.Random], None], ...] = (
    *(change_a_value, change_a_value, change_a_value),
    *(empty_a_container, change_the_lines, change_bytes),
)


def damage(folder: Path, rng: random.Random) -> None:
    """Make one random change to a recording."""
    if rng.randrange(8) == 0:
        change_files(folder, rng)
        return
    file = folder / f"rank-0000{rng.randrange(2)}.jsonl"
    lines = file.read_bytes().splitlines()
    rng.choice(CHANGE_LINES)(lines, rng)
    file.write_bytes(b"\n".join(lines) + b"\n" * rng.randrange(2))


def compared_numbers(run: RunRecording) -> Any:
    """Return all those numbers of the run ``run`` that decide the verdict of a comparison."""
    tensors = [(one.number, one.tensors) for one in run.iterations]
    figures = [(one.losses, one.norm) for one in run.trained]
    bits = {tensor: run.full_tensor(tensor)[1].tobytes() for tensor in run.tensors}
    return tensors, figures, bits


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_damaged_recording_is_named_with_its_value(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    arguments = {"num_layers": 2, "clip_grad": 1.0, "pipeline_slices": "1", "hidden_dropout": 0.1}
    a = read_recording(write(tmp_path / "A", Course(arguments=arguments)))
    outcomes: Counter[str] = Counter()
    for _ in range(CHANGES):
        shutil.rmtree(tmp_path / "B", ignore_errors=True)
        shutil.copytree(tmp_path / "A", tmp_path / "B")
        damage(tmp_path / "B", rng)
        try:
            b = read_recording(tmp_path / "B")
            found = compare_runs(a, b)
            for shown in (found, compare_runs(b, a, b)):
                json.dumps(
                    [
                        comparison_text.rows(shown),
                        comparison_text.tensor_rows(shown),
                        comparison_text.verdict_text(shown),
                    ]
                )
                json.dumps(comparison_text.as_data(shown))
        except (ValueError, OSError) as error:
            assert str(tmp_path / "B") in str(error) and "\n" not in str(error)
            outcomes["refused"] += 1
        else:
            outcomes[found.verdict] += 1
            if found.verdict is ParityVerdict.SAME and not found.norm_alone:
                assert compared_numbers(b) == compared_numbers(a)
    assert outcomes["refused"] > CHANGES / 3


@pytest.mark.parametrize("name", ["digests", "tensors", "losses"])
def test_a_run_without_numbers_is_not_the_same(name: str, tmp_path: Path) -> None:
    """`parity compare` refuses a recording without digests, tensors or losses. If one of two runs
    had no digests at all, the verdict used to be "the same to the last bit" with exit status 0."""
    for folder in ("A", "B"):
        write(tmp_path / folder, Course())
    for file in (tmp_path / "B").glob("*.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        emptied = [line | {name: type(line[name])()} if name in line else line for line in lines]
        file.write_text("".join(json.dumps(line) + "\n" for line in emptied))
    words = ["parity", "compare", str(tmp_path / "A"), str(tmp_path / "B")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2 and result.exception.__class__ is SystemExit
    (line,) = result.stderr.splitlines()
    assert str(tmp_path / "B") in line


def test_a_norm_that_is_no_number_is_no_sum_in_another_order(tmp_path: Path) -> None:
    """A gradient norm that is NaN in one run is reported as a difference. It used to count as one
    ulp away from the other run's norm, and so as a sum in another order."""
    a = read_recording(write(tmp_path / "A", Course()))
    b = read_recording(write(tmp_path / "B", Course(norms=(1.5, float("nan"), 1.125))))
    found = compare_runs(a, b, a)
    assert found.verdict is ParityVerdict.DIFFER and found.first is not None
    assert (found.first.iteration, found.first.what) == (2, "gradient norm")
