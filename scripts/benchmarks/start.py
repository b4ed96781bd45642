"""Measure what the start of a large job adds on each rank, without a GPU.

    python -m scripts.benchmarks.start [--ranks 1000] [--pp 8] [-m 64]

It compares the settings of so many ranks at one store, as a launch does before process groups are
made (the ranks are threads of this process, each with a connection of its own), and builds and
proves programs as every rank does at the first step. NCCL's communicators need GPUs and are not in
it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from megatron_ext.compile.build import build_program
from megatron_ext.compile.registry import choose
from megatron_ext.runtime.store.agreement import Fact, agree
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.problem import Problem
from scripts.benchmarks.harness import arguments

SPECS = ("zb-h1", "interleaved-zb", "zb-v")
COSTS = (10, 12, 8, 1)  # seconds of F, I and W of a rank for a microbatch, and of a message


def main(words: Sequence[str] | None = None) -> None:
    given = arguments(
        __doc__,
        words,
        ranks=(1000, "that compare their settings"),
        pp=(8, "pipeline ranks"),
        microbatches=(64, "of a step"),
    )
    p, m = given.pp, given.microbatches
    seconds = comparison_seconds(given.ranks)
    print(f"{given.ranks} ranks compare their settings in {seconds:.2f} s")
    for spec in SPECS:
        seconds = program_seconds(spec, p, m)
        print(f"{spec}, p = {p}, m = {m}: built and proved in {seconds:.2f} s")


def comparison_seconds(ranks: int) -> float:
    """Return the seconds until all ``ranks`` know that they have the same settings."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connections = [
        dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
        for _ in range(ranks)
    ]
    facts = {"flags": Fact("--pipeline-schedule zb-v", "digest"), "versions": Fact("the same")}
    patience = timedelta(minutes=5)
    threads = [
        threading.Thread(target=agree, args=(store, rank, ranks, facts, patience))
        for rank, store in enumerate(connections)
    ]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def program_seconds(spec: str, ranks: int, microbatches: int) -> float:
    """Return the seconds to build the program of ``spec``, with its messages, waits and proof."""
    resolved = choose(spec)
    placement = resolved.place(ranks)
    problem = Problem(placement, microbatches, uniform(placement, *COSTS))
    start = time.perf_counter()
    build_program(resolved, problem)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
