"""Training over NCCL: what only several GPUs can show. Written without one, and not run yet.

pytest tests/gpu            # on a node with two GPUs or more
"""

from __future__ import annotations

import pytest

from tests.gpu.runs import losses, needs_two_gpus

pytestmark = [pytest.mark.gpu, needs_two_gpus]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-auto"])
def test_losses_are_stocks(schedule: str) -> None:
    """With one stage a rank a run from scratch starts from stock's weights."""
    assert losses(schedule) == losses(None)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v", "interleaved", "gis", "v-half"])
def test_one_communicator_gives_the_losses_of_many(schedule: str) -> None:
    """NCCL runs its batches in order, and CUDA_DEVICE_MAX_CONNECTIONS=1 holds up passes behind a
    batch that waits: should the order of messages be wrong, this hangs."""
    assert losses(schedule, pipeline_p2p="batched") == losses(schedule)


@pytest.mark.parametrize("schedule", ["zb-v", "v-half", "interleaved", "gis"])
def test_it_trains(schedule: str) -> None:
    """Several stages a rank start from other weights; the run must end, and learn."""
    found = [float(loss) for loss in losses(schedule)]
    assert found[-1] < found[0]
