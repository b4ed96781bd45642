"""CUDA graphs are captured while no thread of ours asks the device anything.

A capture in torch's usual mode ("global") fails if any thread of the process queries an event
meanwhile, as the device watchdog does. Whoever captures (Transformer Engine its layers, Megatron
the optimizer's step with --optimizer-cuda-graph, a script) begins by this method.

Not patched: the end of a capture (the watchdog asks again when a step gives the device more), and
captures from C++.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap
from megatron_ext.runtime.watchdog import Watchdog


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """The patch that keeps the watchdog from asking."""
    return (
        wrap(
            "torch.cuda.graphs:CUDAGraph.capture_begin",
            begin_unasked,
            reason="a capture fails if the watchdog queries an event meanwhile",
        ),
    )


def begin_unasked(original: Callable[..., None], graph: Any, *args: Any, **kwargs: Any) -> None:
    """Begin the capture of ``graph``."""
    Watchdog.stop_asking_devices()
    original(graph, *args, **kwargs)
