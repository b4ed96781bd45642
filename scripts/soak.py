"""Run many random programs on real ranks, one after the other: nothing hangs, nothing leaks.

    python scripts/soak.py
    python scripts/soak.py --iterations 1000 --seed 7 --json

The ranks are forked once. In each iteration all of them draw the same family, number of
microbatches and costs, build and prove the program for themselves, and run it with the executor,
the transport and autograd, on stages of one small linear layer. Then the gradients must be those of
one process, to the last bit, and nothing may be left: no message, no activation, no weight
gradient. The exit status is 1 if a rank fails, if an iteration takes more than --seconds, or if a
rank's resident memory grows by more than --growth MiB after the first fifth of the iterations.

v-auto, wave-auto and loop-auto, which search long, have one size, and find in their cache what was
made before the fork.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.graph import Channel, channels
from megatron_ext.compile.program.verify import InvalidSchedule, Program
from megatron_ext.compile.registry import choose, entries
from megatron_ext.runtime.executor import execute
from megatron_ext.runtime.messages.channels import Channels
from megatron_ext.runtime.messages.transport import Boundary, Transport
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.weight_gradients import queue
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.kinds import RULES
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import Problem
from scripts.benchmarks.emulated import AutogradStage

WIDTH = 16
SAMPLES = 3
MICROBATCHES = 12
SEARCHES_LONG = tuple(name for name, entry in entries().items() if entry.traits.searches)
LONG_MICROBATCHES = 2
LONG_COSTS = (10.0, 12.0, 8.0, 1.0)


@dataclass(frozen=True)
class Iteration:
    """Result of one iteration on one rank. ``resident`` is in bytes."""

    number: int
    drawn: str
    seconds: float
    resident: int


class _SplitLinear(torch.autograd.Function):
    """A linear layer whose weight gradient waits for the W pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: torch.nn.Parameter) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        dy_t = dy.t().detach()
        queue.put(ctx.weight, partial(torch.matmul, dy_t, x), [dy_t, x])
        return dy @ ctx.weight, None


class LinearStage(AutogradStage):
    """``y = tanh(x) W^T``; the last stage makes a loss of it, the first draws its own x."""

    def __init__(self, number: int, is_last: bool) -> None:
        super().__init__(number)
        self.is_last = is_last
        draw = torch.Generator().manual_seed(number)
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=draw) / 4)

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor:
        if x is None:
            draw = torch.Generator().manual_seed(microbatch)
            given = torch.randn(SAMPLES, WIDTH, generator=draw).requires_grad_()
        else:
            given = x
        y: Tensor = _SplitLinear.apply(torch.tanh(given), self.weight)
        if self.is_last:
            y = y.square().mean()
        self.between[microbatch] = x, y
        return y


def draw(dice: random.Random, ranks: int) -> tuple[str, Program]:
    """Return a random program, the same on every rank, and its description."""
    while True:
        name = dice.choice(list(entries()))
        microbatches = dice.randint(1, MICROBATCHES)
        f, i, w = (dice.uniform(1, 20) for _ in range(3))
        comm = dice.choice([0.0, dice.uniform(0, 5)])
        try:
            if name in SEARCHES_LONG:
                return f"{name}, m={LONG_MICROBATCHES}", long_search(name, ranks)
            return f"{name}, m={microbatches}", build(name, ranks, microbatches, f, i, w, comm)
        except InvalidSchedule:
            continue  # a size that the family refuses


def long_search(name: str, ranks: int) -> Program:
    return build(name, ranks, LONG_MICROBATCHES, *LONG_COSTS)


def build(
    name: str, ranks: int, microbatches: int, f: float, i: float, w: float, comm: float = 0.0
) -> Program:
    choice = choose(name)
    placement = choice.place(ranks)
    costs = uniform(placement, f, i, w, comm)
    return build_program(choice, Problem(placement, microbatches, costs))


def reference(program: Program, number: int) -> Tensor:
    """Return the weight gradient of stage ``number``, computed in one process and added up in the
    program's order."""
    placement = program.schedule.placement
    per_microbatch = {}
    for microbatch in range(program.problem.microbatches):
        stages = [LinearStage(n, placement.is_last(n)) for n in range(placement.stages)]
        x: Tensor | None = None
        for stage in stages:
            y = stage.forward(microbatch, x)
            x = y.detach().requires_grad_()
        dy: Tensor | None = None
        for stage in reversed(stages[number:]):
            dy = stage.backward(microbatch, dy)
        per_microbatch[microbatch] = stages[number].weight.grad
    total: Tensor | None = None
    for action in program.schedule.rows[placement.rank_of[number]]:
        if action.stage == number and Kind.BACKWARD_WEIGHT in RULES[action.kind].covers:
            gradient = per_microbatch[action.microbatch]
            assert gradient is not None
            total = gradient if total is None else total + gradient
    assert total is not None
    return total


def run(program: Program, ways: Channels, recorder: Recorder) -> None:
    """Run one step of ``program``; raise AssertionError unless its result is right."""
    placement: Placement = program.schedule.placement
    stages = {
        number: LinearStage(number, placement.is_last(number))
        for number in placement.stages_of[ways.rank]
    }
    transport = Transport(ways, Boundary((SAMPLES, WIDTH), torch.float32), placement, recorder)
    execute(program, stages, transport, recorder)
    assert transport.is_empty(), "messages are left over"
    assert not len(queue), "weight gradients are left over"
    queue.clear()  # the step is over: it need not know these weights any more
    assert recorder.position is None
    for number, stage in stages.items():
        assert not stage.between, f"activations of stage {number} are left over"
        gradient = stage.weight.grad
        assert gradient is not None
        assert torch.equal(gradient, reference(program, number)), f"gradients of stage {number}"


def all_channels(ranks: int) -> set[Channel]:
    """Return the channels of all families together. Each has messages to every neighbour that it
    has."""
    union: set[Channel] = set()
    for name in entries():
        if name not in SEARCHES_LONG:  # placed as others are
            union |= set(channels(build(name, ranks, ranks, 1, 1, 1).schedule))
    return union


def resident() -> int:
    """Return the bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def iterate(rank: int, arguments: argparse.Namespace, folder: str) -> Iterator[Iteration]:
    """Yield all iterations of one rank."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=arguments.ranks
    )
    world = dist.group.WORLD
    assert world is not None
    ways = Channels(world, all_channels(arguments.ranks), torch.device("cpu"))
    recorder = Recorder(rank)
    dice = random.Random(arguments.seed)
    for number in range(arguments.iterations):
        start = time.monotonic()
        drawn, program = draw(dice, arguments.ranks)
        run(program, ways, recorder)
        yield Iteration(number, drawn, time.monotonic() - start, resident())


def on_rank(
    rank: int, arguments: argparse.Namespace, folder: str, pipe: connection.Connection
) -> None:
    for iteration in iterate(rank, arguments, folder):
        pipe.send(iteration)
    dist.destroy_process_group()


def gather(
    arguments: argparse.Namespace,
) -> tuple[list[list[Iteration]], str | None]:
    """Return all iterations by rank, and the first failure, if there is one. No rank outlives this
    call."""
    fork = get_context("fork")
    ranks = range(arguments.ranks)
    done: list[list[Iteration]] = [[] for _ in ranks]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        for name in SEARCHES_LONG:
            long_search(name, arguments.ranks)
        pipes = [fork.Pipe(duplex=False) for _ in ranks]
        processes = [
            fork.Process(target=on_rank, args=(rank, arguments, folder, pipes[rank][1]))
            for rank in ranks
        ]
        for process in processes:
            process.start()
        for _, end in pipes:
            end.close()
        try:
            with Progress(
                console=Console(stderr=True)
            ) as progress:  # a thread: not before the fork
                return done, follow(arguments, done, [end for end, _ in pipes], processes, progress)
        finally:
            for process in processes:
                process.kill()
                process.join()


def follow(
    arguments: argparse.Namespace,
    done: list[list[Iteration]],
    pipes: Sequence[connection.Connection],
    processes: Sequence[BaseProcess],
    progress: Progress,
) -> str | None:
    """Put what the ranks tell into ``done``, until they end; what went wrong, if anything did."""
    task = progress.add_task("programs", total=arguments.iterations)
    for number in range(arguments.iterations):
        end_by = time.monotonic() + arguments.seconds
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(max(0.0, end_by - time.monotonic())):
                return f"rank {rank} took over {arguments.seconds:g} s for iteration {number}"
            try:
                done[rank].append(pipe.recv())
            except EOFError:
                return f"rank {rank} has failed in iteration {number}: its error is above"
        progress.update(task, advance=1, description=done[0][-1].drawn)
    for rank, process in enumerate(processes):
        process.join(arguments.seconds)
        if process.exitcode != 0:
            return f"rank {rank} ended with {process.exitcode}"
    return None


def growth(iterations: Sequence[Iteration]) -> float:
    """Return the MiB by which a rank has grown since the first fifth of its iterations."""
    warm = iterations[len(iterations) // 5]
    return (iterations[-1].resident - warm.resident) / 2**20


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0, help="for one iteration")
    parser.add_argument("--growth", type=float, default=2.0, help="MiB that a rank may grow by")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    arguments = parser.parse_args(argv)
    start = time.monotonic()
    done, problem = gather(arguments)
    if problem is None:
        grown = {rank: growth(own) for rank, own in enumerate(done)}
        worst = max(grown, key=grown.__getitem__)
        if grown[worst] > arguments.growth:
            problem = f"rank {worst} has grown by {grown[worst]:.1f} MiB"
    settings = {key: value for key, value in vars(arguments).items() if key != "json"} | {
        "families": len(entries()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}",
        "took": round(time.monotonic() - start, 1),
    }
    if arguments.json:
        ranks = [[asdict(iteration) for iteration in own] for own in done]
        print(json.dumps({"settings": settings, "problem": problem, "ranks": ranks}, indent=2))
    else:
        print_tables(settings, done, problem)
    return int(problem is not None)


def print_tables(
    settings: dict[str, object], done: Sequence[Sequence[Iteration]], problem: str | None
) -> None:
    console = Console()
    for key, value in settings.items():
        console.print(f"{key}: {value}", highlight=False)
    table = Table("rank", "programs", "MiB at first", "warm", "at last", "slowest", box=None)
    for rank, own in enumerate(done):
        if own:
            memory = [iteration.resident / 2**20 for iteration in own]
            slowest = max(own, key=lambda iteration: iteration.seconds)
            table.add_row(
                str(rank),
                str(len(own)),
                *(f"{memory[at]:.1f}" for at in (0, len(own) // 5, -1)),
                f"{slowest.seconds:.2f} s ({slowest.drawn})",
            )
    console.print(table)
    console.print(f"problem: {problem}" if problem else "no problem", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
