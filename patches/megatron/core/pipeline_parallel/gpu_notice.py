"""What a run on a GPU says as long as nobody has measured one."""

from __future__ import annotations

import torch

# True once docs/measurements.md has figures under "On a GPU"; a test compares the two.
HAS_GPU_FIGURES = False

_NOTICE = (
    "megatron_ext: not yet verified on a GPU: if step 1 does not end, write --pipeline-p2p batched "
    "(without vocabulary parallelism or post-validation, which refuse it); docs/gpu-tests.md says "
    "what to report, and where"
)


def say_unverified(device: torch.device) -> None:
    """One line for a run on a GPU, until there are figures."""
    if device.type == "cuda" and not HAS_GPU_FIGURES:
        print(_NOTICE, flush=True)
