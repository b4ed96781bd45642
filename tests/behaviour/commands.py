"""Records of commands: their help texts and their output."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Set
from functools import partial
from typing import Any

import typer

from megatron_ext.cli import app
from megatron_ext.written_settings import add_flags
from tests.behaviour.inputs import COSTS, HEAD, HOST, run, write_inputs
from tests.behaviour.record import Subject

_LINE = (
    "doctor --world-size 8 --gpu h100 -- pretrain.py --pipeline-model-parallel-size 4 "
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
    "--max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 8 --lr 1e-2 "
    "--train-iters 5 --mock-data --tokenizer-type NullTokenizer --vocab-size 8191 "
    "--eval-iters 0 --eval-interval 1000 --transformer-impl local --ckpt-format torch_dist"
)
_MODEL = "layers=16,hidden=2048,heads=16,sequence=2048,vocabulary=64000"
_PRINTED = (
    "schedules",
    f"simulate zb-v --pp 4 -m 8 {COSTS} --memory-limit 4",
    f"simulate zb-h1 --pp 4 -m 8 {HEAD} --vocab-parallel 2",
    f"simulate 1f1b --pp 4 -m 8 {HOST} --activation-offload full",
    f"simulate zb-h1 --pp 4 -m 8 {COSTS} --post-validation",
    "simulate 1f1b --pp 2 -m 2 --certify 60",
    f"plan pp=2,m=4,layers=7 --memory-limit 2 {HEAD}",
    f"plan pp=4,m=8 {COSTS} --pipeline-post-validation",
    f"plan --gpu h100 {_MODEL},pp=4,m=8",
    "trace traced",
    f"{_LINE} --pipeline-schedule zb-v",
    f"{_LINE} --pipeline-schedule zb-h9 --mock-dat",
)
_SETTINGS = (  # settings each of which applies other patches
    "--pipeline-schedule 1f1b",
    "--pipeline-schedule zb-h1",
    "--pipeline-schedule zb-v",
    "--pipeline-schedule interleaved",
    "--pipeline-schedule 1f1b --pipeline-costs profile",
    "--pipeline-schedule 1f1b --pipeline-vocab-parallel 1",
    "--pipeline-schedule 1f1b --pipeline-activation-offload full",
    "--pipeline-schedule zb-v --pipeline-post-validation",
)
_OF_THE_CLOCK = frozenset({"generation_seconds", "made in"})


def helps() -> Subject:
    """Return ``--help`` of each command without its subcommands, and the flags of a training."""
    names = typer.main.get_group(app).commands
    commands = ["", *(f"{name} " for name in names)]
    texts = {f"megatron-ext {name}--help": partial(run, f"{name}--help") for name in commands}
    return texts | {"flags of a training": _flags}


def _flags() -> str:
    return add_flags(argparse.ArgumentParser(prog="pretrain", add_help=False)).format_help()


def outputs() -> Subject:
    """Return the outputs of commands, with ``--json`` and without."""
    write_inputs()
    said: Subject = {words: partial(_printed, words) for words in _PRINTED}
    data = {words: partial(_data, words, _OF_THE_CLOCK) for words in map(_as_json, _PRINTED)}
    patches = {f"doctor --json {words}: applied": partial(_applied, words) for words in _SETTINGS}
    return {
        **said,
        **data,
        **patches,
        "verify mine.csv": partial(run, "verify mine.csv"),
        "doctor --json": partial(_data, "doctor --json", {"environment"}),
    }


def _as_json(words: str) -> str:
    command, _, rest = words.partition(" ")
    return f"{command} --json {rest}".rstrip()


def _printed(words: str) -> str:
    # The refusals of the command plan are in its stderr.
    lines = run(words, with_stderr=words.startswith("plan")).splitlines()
    return "\n".join(line for line in lines if not line.startswith(tuple(_OF_THE_CLOCK)))


def _data(words: str, left_out: Set[str]) -> str:
    """Return the data that ``words`` print, with a line for each key and for each element of a list
    of objects. Floats have nine digits."""
    said = run(words, with_stderr=False)
    *status, printed = re.split(r"(?<=^exits with \d)\n", said, maxsplit=1)
    data = json.loads(
        printed,
        parse_float=lambda text: float(f"{float(text):.9g}"),
        object_hook=lambda fields: {k: "..." if k in left_out else v for k, v in fields.items()},
    )
    return "\n".join([*status, *_lines(data)])


def _lines(data: Any) -> Iterator[str]:
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        is_table = isinstance(value, list) and value and isinstance(value[0], dict)
        for row in value if is_table else [value]:
            yield f"{key}: {json.dumps(row)}"


def _applied(words: str) -> str:
    patches = json.loads(run(f"doctor --json {words}", with_stderr=False))["patches"]
    return "\n".join(row["target"] for row in patches if row["state"] == "would be applied")
