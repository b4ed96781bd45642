"""Notice of a run on several GPUs, as long as no such run has been reported.

Schedules were tested on CPUs and simulated for GPUs. Whoever trains on GPUs is told so once, in the
log, and where to report what was measured.
"""

from __future__ import annotations

import torch

from megatron_ext.base.logger import logger
from megatron_ext.schedule.problem import P2P, Problem

# True once docs/measurements.md has results under "On several GPUs"; a test compares the two.
HAS_FIGURES = False

_BATCHED = (
    "write --pipeline-p2p batched (without vocabulary parallelism or post-validation, which refuse "
    "it); "
)


def say_unverified(device: torch.device, problem: Problem) -> None:
    """Log one line before a first run on several GPUs that such runs are not yet verified.

    Nothing is logged once measurements of such runs are published.
    """
    if device.type != "cuda" or HAS_FIGURES:
        return
    advice = "" if problem.options.p2p is P2P.BATCHED else _BATCHED
    logger.info(
        f"not yet verified on several GPUs (on one, shared by two ranks, it is): if step 1 does "
        f"not end, {advice}docs/measurements.md says what to report, and where"
    )
