"""Tests that every reader of users' files and texts accepts a randomly changed one, or refuses it
in one line.

The line names what is wrong, and memory and time are bounded. The random changes are seeded: a
hundred by day, many more at night.
"""

from __future__ import annotations

import json
import random
import re
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from megatron_ext.cli import app
from megatron_ext.commands.output import fail
from megatron_ext.cost_model.gpus import parse_gpus
from megatron_ext.cost_model.short_form import parse_model
from megatron_ext.launch.command import megatron_arguments
from megatron_ext.launch.command.arguments_file import read_arguments_file
from megatron_ext.launch.command.importing import silently
from megatron_ext.launch.command.log.megatron_log import launch_from_log
from megatron_ext.launch.planner.parsed_launch import LaunchRequest, with_launch
from megatron_ext.written_settings import from_argv
from tests.helpers.combinations import IS_NIGHT
from tests.helpers.limited import MOST_BYTES, MOST_SECONDS, Ended, call_limited, run_limited
from tests.helpers.megatron_runs import model_flags
from tests.helpers.recordings import Course, write

SIMULATE = ("simulate", "zb-h1", "--pp", "2", "-m", "4")
MODEL = "layers=4,hidden=64,heads=4,sequence=64,vocabulary=100,micro-batch=1,precision=fp8"
# Texts of a command line: the words before the text, a valid text, and the words after it.
TEXTS: dict[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    "costs": (
        (*SIMULATE, "--costs"),
        "f=1,i=1.5,w=1,comm=0.1,output_layer=2/3/1,embedding=1/1",
        (),
    ),
    "limit": ((*SIMULATE, "--memory-limit"), "0.9x", ()),
    "speeds": ((*SIMULATE, "--rank-speeds"), "1,0.77", ()),
    "lengths": (("simulate", "1f1b", "--pp", "2", "-m", "4", "--slice-lengths"), "64,32", ()),
    "recompute": ((*SIMULATE, "--recompute"), "first:1", ()),
    "schedule": (("simulate",), "interleaved:vpp=2", ("--pp", "2", "-m", "4")),
    "deviation": ((*SIMULATE, "--microbatch-costs"), "lognormal:0.5", ()),
}
DRAWS = 10 if IS_NIGHT else 1  # random changes for each seed
SEEDS = range(60 if IS_NIGHT else 6)
EXTREMES = (
    *("0", "-1", "1e308", "-1e308", "1e-300", "1e17", "nan", "inf", "9" * 400, "0.1", "2147483648"),
    *("null", "true", '""', "[]", "{}", "[[]]", '"x"', "x", "", "é", "\udcff", "\0", "[" * 2000),
)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


def mutated(text: str, rng: random.Random) -> str:
    """Return ``text`` with one to three random changes."""
    for _ in range(rng.randint(1, 3)):
        numbers = [*_NUMBER.finditer(text)]
        start, end = sorted(rng.randint(0, len(text)) for _ in range(2))
        end = min(end, start + 40)
        kind = rng.randrange(6)
        if kind < 2 and numbers:
            start, end = rng.choice(numbers).span()
            text = text[:start] + rng.choice(EXTREMES) + text[end:]
        elif kind == 2:
            text = text[:start] + text[end:]
        elif kind == 3:
            text = text[:end] + text[start:]
        elif kind == 4:
            text = text[:start] + rng.choice(EXTREMES) + text[start:]
        elif kind == 5:
            text = text[: rng.randint(0, len(text))]
    return text


def block() -> str:
    """Return the block of arguments that Megatron prints at the start of a training."""
    words = model_flags(global_batch_size=16, num_experts=2, moe_layer_freq="[0,1]*2", num_layers=4)
    args = megatron_arguments.parse_arguments(words).args
    with silently(), megatron_arguments.on_gpus(args):
        args = megatron_arguments.validate(args, from_argv(words), 8)
    lines = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in vars(args).items()]
    dashes = "-" * 24
    return "\n".join(
        [f"{dashes} arguments {dashes}", *lines, f"{dashes} end of arguments {dashes}"]
    )


CONFIG = {
    **{"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64},
    **{"micro_batch_size": 1, "global_batch_size": 8, "pipeline_model_parallel_size": 2},
    **{"world_size": 4, "lr": 0.01, "bf16": True, "normalization": "RMSNorm", "swiglu": True},
    **{"num_moe_experts": 4, "moe_layer_freq": "[0,1]*2", "train_iters": 10},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Callable[[], None]]]:
    """Return valid files by name, each with a function that reads it."""
    folder = tmp_path_factory.mktemp("files")

    def command(*words: str) -> Callable[[], None]:
        return lambda: app(list(words), prog_name="megatron-ext")

    def read_log() -> None:
        launch = launch_from_log(Path("train.log"))
        with_launch(LaunchRequest(launch), lambda parsed: None)

    def read_config() -> None:
        file = read_arguments_file(Path("config.json"))
        request = LaunchRequest(values=file.values, config=file.path)
        with_launch(request, lambda parsed: None)

    made = [
        *SIMULATE,
        "--csv",
        str(folder / "table.csv"),
        "--perfetto",
        str(folder / "simulated.json"),
    ]
    assert CliRunner().invoke(app, made).exit_code == 0
    costs = {
        **{"version": 2, "origin": "by hand", "f": [1.0, 2.0], "i": [1.0, 2.0], "w": [0.5, 1]},
        **{"comm": 0.1},
    }
    (folder / "costs.json").write_text(json.dumps(costs))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "train.log").write_text(block())
    (folder / "lengths.txt").write_text("512 1024\n2048\n" * 20)
    write(folder / "A", Course())
    return {
        "costs": (folder / "costs.json", command(*SIMULATE, "--costs", "costs.json")),
        "table": (folder / "table.csv", command("simulate", "table.csv", *SIMULATE[2:])),
        "verified": (folder / "table.csv", command("verify", "table.csv")),
        "lengths": (
            folder / "lengths.txt",
            command(*SIMULATE, "--microbatch-costs", "lengths.txt"),
        ),
        "config": (folder / "config.json", failing(read_config)),
        "log": (folder / "train.log", failing(read_log)),
        "recording": (folder / "A" / "rank-00000.jsonl", command("parity", "compare", "A", "A")),
    }


def failing(read: Callable[[], object]) -> Callable[[], None]:
    """Return a function that calls ``read`` and ends as a command does, with an error line and an
    exit code."""

    def run() -> None:
        try:
            read()
        except ValueError as error:
            try:
                fail(error)
            except typer.Exit as end:
                raise SystemExit(end.exit_code) from None

    return run


def judge(ended: Ended, what: object) -> None:
    """Assert that a command accepted what it read, or refused it in one line, in bounded memory and
    time."""
    assert ended.status in (0, 1, 2) and "Traceback" not in ended.output, (what, ended)
    assert ended.grown < MOST_BYTES and ended.seconds < MOST_SECONDS, (what, ended)
    if ended.status == 2:
        errors = [line for line in ended.output.splitlines() if "error: " in line]
        (line,) = errors or ["usage"] if "Usage:" in ended.output else errors[-1:]
        assert line == "usage" or line.split("error: ", 1)[1].strip(), (what, ended)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", TEXTS)
def test_a_mutated_text_is_taken_or_refused(name: str, seed: int, tmp_path: Path) -> None:
    before, text, after = TEXTS[name]
    rng = random.Random(f"{name} {seed}")
    for _ in range(DRAWS):
        changed = mutated(text, rng).replace("\0", "")
        words = [*before, changed, *after]
        judge(run_limited(words, tmp_path), shlex.join(words))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("read", "text"),
    [(parse_gpus, "operations=4e14,bytes=4e10,host=3e10,memory=80GiB"), (parse_model, MODEL)],
)
def test_a_mutated_description_is_taken_or_refused(
    read: Callable[[str], object], text: str, seed: int, tmp_path: Path
) -> None:
    rng = random.Random(f"{text} {seed}")
    for _ in range(DRAWS):
        changed = mutated(text, rng)
        judge(call_limited(failing(partial(read, changed)), tmp_path), changed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "name", ["costs", "table", "verified", "lengths", "config", "log", "recording"]
)
def test_a_mutated_file_is_taken_or_refused(
    name: str, seed: int, files: dict[str, tuple[Path, Callable[[], None]]]
) -> None:
    path, read = files[name]
    text, rng = path.read_text(), random.Random(f"{name} {seed}")
    folder = path.parent if path.parent.name != "A" else path.parent.parent
    try:
        for _ in range(DRAWS):
            changed = mutated(text, rng)
            path.write_bytes(changed.encode(errors="surrogateescape"))
            ended = call_limited(read, folder)
            judge(ended, (name, changed[:3000]))
            if ended.status == 2:
                assert path.name in ended.output or "schedule" in ended.output, ended
    finally:
        path.write_text(text)
