"""Calls of Megatron's forward_step and backward_step, recorded as passes.

Megatron's pipeline functions call both by name, and wait for messages outside of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron_ext.runtime.recorder import Recorder
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.placement import Placement


class StockPasses:
    """Passes that Megatron's own schedule runs in one step on one rank, as they are recorded.

    A forward pass gets its chunk and microbatch as arguments. A backward pass does not: it is
    matched with the forward pass whose output it gets.
    """

    def __init__(self, recorder: Recorder, placement: Placement) -> None:
        self._recorder = recorder
        self._stages = placement.stages_of[recorder.rank]
        # Forward passes whose backward pass has not run yet, by the id() of their output tensor.
        self._forwards: dict[int, Action] = {}

    def forward(self, run: Callable[[], Any], chunk: int, microbatch: int) -> Any:
        """Record a forward pass, and return the result of ``run``: (output, number of tokens)."""
        action = Action(self._stages[chunk], Kind.FORWARD, microbatch)
        result = self._run(run, action)
        self._forwards[id(result[0])] = action
        return result

    def backward(self, run: Callable[[], Any], output: Any) -> Any:
        """Record the backward pass of ``output``, and return the result of ``run``."""
        forward = self._forwards.pop(id(output), None)
        if forward is None:  # the forward pass was not observed; a trace reports it as missing
            return run()
        return self._run(run, forward._replace(kind=Kind.FULL_BACKWARD))

    def _run(self, run: Callable[[], Any], action: Action) -> Any:
        try:
            with self._recorder.computing(action):
                return run()
        except BaseException as error:
            self._recorder.failed(error, action)
            raise


_watching: StockPasses | None = None


@contextmanager
def watching(passes: StockPasses) -> Iterator[None]:
    """Context in which ``passes`` records calls of Megatron's forward_step and backward_step."""
    global _watching
    _watching = passes
    try:
        yield
    finally:
        _watching = None


def watched_forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run Megatron's forward_step (``original``), recorded while a step is watched."""
    if _watching is None:
        return original(*args, **kwargs)
    chunk, microbatch = kwargs.get("vp_stage") or 0, kwargs["current_microbatch"]
    return _watching.forward(lambda: original(*args, **kwargs), chunk, microbatch)


def watched_backward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run Megatron's backward_step (``original``), recorded while a step is watched."""
    if _watching is None:
        return original(*args, **kwargs)
    output = kwargs["output_tensor"] if "output_tensor" in kwargs else args[1]
    return _watching.backward(lambda: original(*args, **kwargs), output)
