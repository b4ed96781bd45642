"""Records of the programs of families with sizes, costs, limits and settings, as `simulate` builds
them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from megatron_ext.compile.build import build_program
from megatron_ext.compile.registry import choose, entries
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.problem import P2P, Problem, ScheduleOptions, VocabularyParallel
from tests.behaviour.inputs import COSTS, HEAD, HOST, own_families, run, write_inputs
from tests.behaviour.record import Subject, digest

_IN_ALL_FAMILIES = (
    f"--pp 1 -m 3 {COSTS}",
    f"--pp 2 -m 2 {COSTS}",
    f"--pp 3 -m 7 {COSTS}",
    f"--pp 8 -m 16 {COSTS}",
    "--pp 4 -m 8",
    "--pp 4 -m 8 --costs f=10,i=12,w=8,comm=5",
    "--pp 4 -m 8 --costs bytes.json",
    "--pp 4 -m 8 --costs bytes.json --memory-limit 6GiB",
    f"--pp 4 -m 8 {COSTS} --memory-limit 0.5x",
    f"--pp 4 -m 8 {COSTS} --memory-limit 6",
    f"--pp 4 -m 8 {COSTS} --p2p batched",
    f"--pp 3 -m 6 {HEAD}",
    f"--pp 3 -m 6 {HEAD} --vocab-parallel 1",
    f"--pp 4 -m 8 {HEAD} --vocab-parallel 2",
    f"--pp 4 -m 8 {HOST} --activation-offload half",
    f"--pp 4 -m 8 {HOST},link=2,duplex=0 --activation-offload full",
    f"--pp 4 -m 8 {HOST} --activation-offload fit --memory-limit 3",
    f"--pp 4 -m 8 {COSTS} --post-validation",
)
_MORE = (
    f"interleaved:vpp=3 --pp 2 -m 4 {COSTS}",
    f"interleaved:group=8 --pp 4 -m 8 {COSTS}",
    f"interleaved-zb:vpp=3,group=4 --pp 4 -m 8 {COSTS}",
    f"gis:group=2 --pp 4 -m 8 {COSTS}",
    f"2bp:base=gpipe --pp 4 -m 8 {COSTS}",
    f"hanayo:waves=1 --pp 4 -m 8 {COSTS}",
    f"zb-2p:paper_count=true --pp 4 -m 8 {COSTS}",
    f"zb-auto --pp 4 -m 8 {HEAD} --vocab-parallel 1 --memory-limit 6",
    f"zb-auto --pp 4 -m 8 {COSTS} --post-validation --memory-limit 5",
    f"zb-v --pp 4 -m 8 {HEAD} --vocab-parallel 1 --memory-limit 6",
    "1f1b --pp 4 -m 4 --costs f=5/5/5/8,i=6/6/6/9,w=4/4/4/6",
    *(
        f"{name} --pp 4 -m 10 --costs f=9/7/6/8,i=8/11/7/10,w=4/5/8/6,comm=2{limit}"
        for name in ("zb-auto", "zb-1p", "zb-2p")
        for limit in ("", " --memory-limit 5", " --post-validation")
    ),
    *(
        f"{name} --pp 2 -m 6 --costs f=9/7/6/8,i=8/11/7/10,w=4/5/8/6,comm=2{limit}"
        for name in ("v-auto", "gis", "interleaved-zb", "v-min")
        for limit in ("", " --memory-limit 2.5")
    ),
    "mine.csv --pp 2 -m 2",
    *(f"{name} --pp 4 -m 8 {COSTS}" for name in own_families()),
)


def programs() -> Subject:
    write_inputs()
    asked = [f"{name} {words}" for name in entries() for words in _IN_ALL_FAMILIES]
    evaluated = {
        f"evaluation: {name} 4 8{about}": partial(_evaluated, name, p2p, vocabulary)
        for name in entries()
        for about, p2p, vocabulary in (
            ("", P2P.ASYNC, VocabularyParallel.NONE),
            (" batched", P2P.BATCHED, VocabularyParallel.NONE),
            (" vocabulary 2", P2P.ASYNC, VocabularyParallel.TWO),
        )
    }
    return {words: partial(_simulated, words) for words in (*asked, *_MORE)} | evaluated


def _simulated(words: str) -> str:
    """Return the digest of a program, with numbers that show in what two programs with different
    digests differ."""
    said = run(f"simulate {words} --json --program program.txt")
    if not said.startswith("{"):
        return said
    report = json.loads(said)
    figures = {
        "makespan": report["makespan"],
        "where passes wait": report["makespan_if_passes_wait"],
        "span": report["span"],
        "step": report["step"],
        "holds": report["peak_activation_microbatches"],
    }
    if any(report["host_microbatches"]):
        figures["on the host"] = report["host_microbatches"]
    order = "in" if report["bitwise_order"] else "not in"
    return ", ".join(
        [
            _described(Path("program.txt").read_text()),
            *(f"{name} {_written(figure)}" for name, figure in figures.items()),
            f"{order} order",
        ]
    )


def _written(figure: float | list[float]) -> str:
    return "/".join(f"{value:.9g}" for value in (figure if isinstance(figure, list) else [figure]))


def _described(text: str) -> str:
    return f"{digest(text)} {text.count(',') + text.count('\n')} actions"


def _evaluated(name: str, p2p: P2P, vocabulary: VocabularyParallel) -> str:
    resolved = choose(name)
    placement = resolved.place(4)
    costs = parse_costs(HEAD.split()[1], placement)
    problem = Problem(
        placement,
        8,
        costs,
        forward_only=True,
        options=ScheduleOptions(p2p=p2p, vocab_parallel=vocabulary),
    )
    return _described(build_program(resolved, problem).text)
