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


def gpu_notice(device: torch.device) -> str | None:
    """The line for a run on ``device``; None on the CPU, and once there are figures."""
    return None if HAS_GPU_FIGURES or device.type != "cuda" else _NOTICE
