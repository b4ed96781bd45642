"""Tests of several instances of the distributed optimizer, whose gradients are reduced during the
passes.

Stock then keeps no handle of a reduction. A reduction that the schedule had started used to run a
second time at the end of the step, on gradients that were reduced already. The second mean over
replicas made the gradient norm too small; with loss per token, a second sum made it too large. A
second mean changes nothing if each instance has one replica, so these tests have two replicas in
each. Stock itself reduces twice on later pipeline ranks unless it gets --no-align-grad-reduce.
"""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from tests.helpers.combinations import at_night
from tests.helpers.drawn_models import drawn_by_name
from tests.helpers.megatron_runs import EXPERTS, Run, assert_same, model_flags, train
from tests.helpers.optimizer_instances import means_after_a_failed_step, use_einops

RANKS, STEPS = 8, 2  # two pipeline ranks and four replicas: two instances of two replicas each
SHARED_EXPERTS = {**EXPERTS, "expert_model_parallel_size": 2}
PER_TOKEN = {"calculate_per_token_loss": True}
SETTINGS: dict[str, dict[str, object]] = {
    "experts, loss per token": SHARED_EXPERTS | PER_TOKEN,
    "experts": SHARED_EXPERTS,
    "averaged": {"ddp_average_in_collective": True},
    "loss per token, gathers not overlapped": {**PER_TOKEN, "overlap_param_gather": None},
}
SCHEDULES = ("zb-v", "1f1b", "zb-h1", "interleaved-zb")


@pytest.fixture(autouse=True)
def einops(monkeypatch: pytest.MonkeyPatch) -> None:
    use_einops(monkeypatch)


def run(setting: str, **more: object) -> list[Run]:
    flags: dict[str, object] = {
        "pipeline_model_parallel_size": 2,
        "untie_embeddings_and_output_weights": True,
        "train_iters": STEPS,
        "global_batch_size": 16,
        "bf16": True,
        "use_distributed_optimizer": True,
        "num_distributed_optimizer_instances": 2,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        **SETTINGS[setting],
        **more,
    }
    return train(RANKS, model_flags(**flags), model_provider=drawn_by_name)


@functools.cache
def stock(setting: str) -> list[Run]:
    return run(setting, no_align_grad_reduce=True)


def note_reductions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each rank write a file in ``folder``. It has a line for each reduction of a bucket
    group, written when Megatron checks the gradients before the reduction, and a line for each
    chunk whose reductions Megatron waits for."""
    check, finish = _ParamAndGradBucketGroup.check_grads, DistributedDataParallel.finish_grad_sync

    def note(text: str) -> None:
        with (folder / f"rank {dist.get_rank()}").open("a") as file:
            file.write(text + "\n")

    @functools.wraps(check)  # Coverage identifies a function by the original's code.
    def noted_check(group: _ParamAndGradBucketGroup, *args: Any, **kwargs: Any) -> None:
        note("reduction")
        check(group, *args, **kwargs)

    def noted_finish(chunk: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        note(f"finish {len(chunk.bucket_groups + chunk.expert_parallel_bucket_groups)}")
        finish(chunk, *args, **kwargs)

    monkeypatch.setattr(_ParamAndGradBucketGroup, "check_grads", noted_check)
    monkeypatch.setattr(DistributedDataParallel, "finish_grad_sync", noted_finish)


@pytest.mark.parametrize("instances", [1, 2])
def test_a_reduction_of_a_step_that_failed_is_not_the_next_steps(instances: int) -> None:
    """A reduction that a failed step started does not count for the next step. It used to count, so
    the next step's gradients were not reduced, without an error."""
    assert means_after_a_failed_step(instances) == [[2.0, 2.0]] * 2


CASES = [("experts, loss per token", "zb-v")]
CASES += at_night(*(case for case in itertools.product(SETTINGS, SCHEDULES) if case != CASES[0]))


@pytest.mark.parametrize(("setting", "schedule"), CASES)
def test_gradients_are_reduced_once(
    setting: str, schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several optimizer instances, gradients are reduced once in a step. The reduction starts
    before Megatron waits for it, so it still overlaps with passes."""
    expected = stock(setting)
    note_reductions(tmp_path, monkeypatch)
    assert_same(run(setting, pipeline_schedule=schedule), expected)
    files = [*tmp_path.iterdir()]
    assert len(files) == RANKS
    for file in files:
        events = file.read_text().splitlines()
        finished = [n for n, event in enumerate(events) if event.startswith("finish")]
        assert len(finished) % STEPS == 0
        chunks = len(finished) // STEPS
        groups = sum(int(events[n].split()[1]) for n in finished[:chunks])
        step = ["reduction"] * groups + [events[n] for n in finished[:chunks]]
        assert groups >= chunks and events == step * STEPS
