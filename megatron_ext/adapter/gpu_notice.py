"""What a run on a GPU says as long as nobody has measured one."""

from __future__ import annotations

import torch

from megatron_ext.logger import logger
from megatron_ext.schedule.problem import P2P, Problem

# True once docs/measurements.md has figures under "On a GPU"; a test compares the two.
HAS_GPU_FIGURES = False

_BATCHED = (
    "write --pipeline-p2p batched (without vocabulary parallelism or post-validation, which refuse "
    "it); "
)


def say_unverified(device: torch.device, problem: Problem) -> None:
    """One line for a run of ``problem`` on a GPU, until there are figures."""
    if device.type != "cuda" or HAS_GPU_FIGURES:
        return
    instead = "" if problem.extras.p2p is P2P.BATCHED else _BATCHED
    logger.info(
        f"not yet verified on a GPU: if step 1 does not end, {instead}docs/gpu-tests.md says what "
        f"to report, and where"
    )
