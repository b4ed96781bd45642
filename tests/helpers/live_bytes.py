"""Bytes of a training step on one rank after every action, whatever runs in it.

Storages count that were created during the step and are still alive, as in `held_bytes`, which also
attributes each storage to a stage and a microbatch. This module compares two runs of one program,
so the owners do not matter.
"""

from __future__ import annotations

import functools
import itertools
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules as stock

from megatron_ext.adapter.step import passes
from megatron_ext.compile.program.verify import Program
from megatron_ext.features.offload.runtime import offload
from megatron_ext.runtime.executor import _Execution
from tests.helpers.storages import LiveStorages, addresses

# Seconds after which gloo's threads have dropped the tensors of an ended exchange. Of 1,000
# all-gathers over two ranks, 11 still held a tensor when they ended, and 1 a millisecond later.
SETTLED = 0.01

# A sample of memory at each action: its name, the bytes of tensors that the rank then holds, and
# the bytes of messages that are on their way.
Samples = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class CountedStep:
    """Byte counts of a rank's second step. ``digest`` is that of the program, or "" under
    Megatron's own schedule."""

    digest: str
    samples: Samples

    @property
    def peak(self) -> int:
        return max(held + on_way for _, held, on_way in self.samples)


def count_bytes(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let ranks that are forked from now on count the bytes of their second step, and write the
    counts to ``folder``."""
    monkeypatch.setattr(offload, "SMALL", 0)
    monkeypatch.setattr(_Execution, "run", _but_for_the_first(_Execution.run, _run(folder)))
    monkeypatch.setattr(passes, "execute", _noting_program(passes.execute))
    for name in ("with", "without"):
        function = f"forward_backward_pipelining_{name}_interleaving"
        original = getattr(stock, function)
        counted = functools.partial(_count_stock, original, folder)
        monkeypatch.setattr(stock, function, _but_for_the_first(original, counted))


def counted(folder: Path, ranks: range) -> list[CountedStep]:
    """Return the byte counts that ``ranks`` have written to ``folder``."""
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in ranks]


def _but_for_the_first(run: Callable[..., Any], then: Callable[..., Any]) -> Callable[..., Any]:
    functions = itertools.chain([run], itertools.repeat(then))

    @functools.wraps(run)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return next(functions)(*args, **kwargs)

    return chosen


_digests: list[str] = []


def _noting_program(execute: Callable[..., None]) -> Callable[..., None]:
    def noted(program: Program, *args: Any) -> None:
        _digests[:] = [program.digest]
        execute(program, *args)

    return noted


def _run(folder: Path) -> Callable[[_Execution], None]:
    run = _Execution.run

    def run_counted(execution: _Execution) -> None:
        perform, samples, live = execution.perform, list[tuple[str, int, int]](), LiveStorages()

        def sampled(action: Any) -> None:
            perform(action)
            time.sleep(SETTLED)
            sizes = live.sizes()
            moving = addresses(list(_moving(execution))) & sizes.keys()
            on_way = sum(sizes[address] for address in moving)
            samples.append((str(action), sum(sizes.values()) - on_way, on_way))

        execution.perform = sampled  # type: ignore[method-assign]
        with live:
            run(execution)
        step = CountedStep(_digests[0], tuple(samples))
        (folder / str(execution.rank)).write_bytes(pickle.dumps(step))

    return run_counted


def _moving(execution: _Execution) -> Iterator[object]:
    """Yield the tensors of messages and collectives that an execution holds."""
    stage_io: Any = execution.owners[0]
    yield [*stage_io.outputs.values(), *stage_io.gradients.values()]
    # Attributes of a transport that hold tensors of messages; each kind of transport has some of
    # them.
    for name in ("_sending", "_receiving", "_in_flight", "_next"):
        yield [*vars(stage_io._transport).get(name, {})]
        yield [*getattr(vars(stage_io._transport).get(name), "values", list)()]
    # With a split vocabulary the collectives also hold tensors.
    if hasattr(stage_io._ends, "_exchange"):
        yield [*stage_io._ends._exchange._in_flight.values()]


def _count_stock(run: Callable[..., Any], folder: Path, *args: Any, **kwargs: Any) -> Any:
    """Run a step of Megatron's own schedule, and count after each of its passes."""
    live, samples = LiveStorages(), list[tuple[str, int, int]]()
    names = {"forward_step": "F", "backward_step": "B"}
    originals = {name: getattr(stock, name) for name in names}

    def sampled(name: str, *given: Any, **more: Any) -> Any:
        result = originals[name](*given, **more)
        samples.append((names[name], sum(live.sizes().values()), 0))
        return result

    for name in names:
        setattr(stock, name, functools.partial(sampled, name))
    try:
        with live:
            result = run(*args, **kwargs)
    finally:
        for name, original in originals.items():
            setattr(stock, name, original)
    rank = parallel_state.get_pipeline_model_parallel_rank()
    (folder / str(rank)).write_bytes(pickle.dumps(CountedStep("", tuple(samples))))
    return result
