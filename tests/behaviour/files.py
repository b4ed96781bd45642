"""Records of the files that commands write for small inputs, without pictures, which matplotlib
writes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from megatron_ext.schedule.costs_text import parse_costs, save_costs
from megatron_ext.schedule.placement import line
from tests.behaviour.inputs import COSTS, HEAD, HOST, run, write_inputs
from tests.behaviour.record import Subject

_SETTINGS = (
    f"1f1b --pp 2 -m 2 {COSTS}",
    f"zb-v --pp 2 -m 3 {COSTS}",
    f"zb-h1 --pp 2 -m 2 {HOST} --activation-offload full",
    f"zb-h1 --pp 2 -m 2 {COSTS} --post-validation",
    f"zb-h1 --pp 2 -m 2 {COSTS} --p2p batched",
    "my_schedule.py --pp 2 -m 2",
)
_DIVIDED = f"zb-h1 --pp 2 -m 2 {HEAD} --vocab-parallel 1"
_WRITTEN = {
    "csv": _SETTINGS,  # a schedule with a split vocabulary cannot be written as a table
    "program": (*_SETTINGS, _DIVIDED),
    "perfetto": (_SETTINGS[0], _SETTINGS[2], _DIVIDED),
}


def files() -> Subject:
    write_inputs()
    simulated = {
        f"simulate {words} --{kind}": partial(_simulated, words, kind)
        for kind, settings in _WRITTEN.items()
        for words in settings
    }
    costs = {f"costs {text}": partial(_costs, text) for text in _costs_texts()}
    return {**simulated, **costs, "trace of measured steps": Path("traced/trace.json").read_text}


def _simulated(words: str, kind: str) -> str:
    run(f"simulate {words} --{kind} written")
    return Path("written").read_text()


def _costs_texts() -> list[str]:
    given = [words.split()[1] for words in (COSTS, HEAD, HOST)]
    return [*given, f"{given[-1]},link=2,duplex=0", "f=1/3,i=1,w=0.333333333", "bytes.json"]


def _costs(text: str) -> str:
    save_costs(parse_costs(text, line(2)), Path("costs.json"))
    return Path("costs.json").read_text()
