"""CUDA graph captures, during which no thread of ours queries the device.

A capture in torch's usual mode ("global") fails if any thread of the process queries an event
meanwhile, as the device watchdog does. Every capture (of layers by Transformer Engine, of the
optimizer's step by Megatron with --optimizer-cuda-graph, of a script) begins by the patched method,
CUDAGraph.capture_begin.

Not patched: the end of a capture (the watchdog resumes when a step launches more work), and
captures from C++.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap
from megatron_ext.runtime.watchdog import Watchdog


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch that stops the watchdog's queries while a CUDA graph is captured."""
    return (
        wrap(
            "torch.cuda.graphs:CUDAGraph.capture_begin",
            begin_unasked,
            reason="the capture of a CUDA graph fails if the watchdog queries an event",
        ),
    )


def begin_unasked(original: Callable[..., None], graph: Any, *args: Any, **kwargs: Any) -> None:
    """Stop the watchdog's queries, then begin the capture of ``graph``."""
    Watchdog.stop_asking_devices()
    original(graph, *args, **kwargs)
