"""Tests of Megatron's settings for work that our schedules do themselves, such as deferred weight
gradients.

They also check that tensor-parallel ranks start their communication in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core.tensor_parallel import layers, mappings

from tests.helpers.combinations import nightly
from tests.helpers.drawn_models import drawn_by_name
from tests.helpers.megatron_runs import assert_same, losses, model_flags, train
from tests.helpers.ranks import lasting_folder

UNTIED: dict[str, object] = {"untie_embeddings_and_output_weights": True}
DEFERRED: dict[str, object] = {"defer_embedding_wgrad_compute": True, "wgrad_deferral_limit": 1}
GROUP = "microbatch_group_size_per_virtual_pipeline_stage"


@nightly("test_handled_settings.py: the setting is off")
@pytest.mark.covers(
    "A", ("line", "loop", "v"), defer_embedding_wgrad_compute=True, wgrad_deferral_limit=1
)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved-zb", "zb-v"])
def test_deferred_weight_gradients_of_the_embedding(schedule: str) -> None:
    common: dict[str, object] = {"pipeline_model_parallel_size": 2, "train_iters": 3, **UNTIED}
    if schedule == "interleaved-zb":
        common["num_virtual_stages_per_pipeline_rank"] = 2
    reference = train(2, model_flags(**common), model_provider=drawn_by_name)
    ours = model_flags(**common, **DEFERRED, pipeline_schedule=schedule)
    assert_same(train(2, ours, model_provider=drawn_by_name), reference)


@nightly("test_handled_settings.py: the setting is off")
@pytest.mark.covers("A", ("line", "loop", "v"), overlap_dispatch_backward_with_experts_wgrad=True)
@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved-zb", "zb-v"])
def test_weight_gradients_of_experts_during_their_dispatch(schedule: str) -> None:
    common: dict[str, object] = {
        "pipeline_model_parallel_size": 2,
        "train_iters": 3,
        "expert_model_parallel_size": 2,
        "num_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 32,
        "moe_token_dispatcher_type": "alltoall",
        "disable_bias_linear": True,
        **UNTIED,
    }
    if schedule == "interleaved-zb":
        common["num_virtual_stages_per_pipeline_rank"] = 2
    reference = train(4, model_flags(**common), model_provider=drawn_by_name)
    overlapped = {"overlap_dispatch_backward_with_experts_wgrad": True}
    ours = model_flags(**common, **overlapped, pipeline_schedule=schedule)
    assert_same(train(4, ours, model_provider=drawn_by_name), reference)


@nightly("test_handled_settings.py: the schedule is that of the option")
@pytest.mark.covers("A", ("loop",), microbatch_group_size_per_vp_stage=4)
@pytest.mark.parametrize("schedule", ["interleaved", "interleaved-zb"])
def test_a_group_of_microbatches(schedule: str) -> None:
    flags: dict[str, object] = {
        "pipeline_model_parallel_size": 2,
        "num_virtual_stages_per_pipeline_rank": 2,
        "train_iters": 3,
        GROUP: 4,
    }
    reference = train(2, model_flags(**flags))
    assert_same(train(2, model_flags(**flags, pipeline_schedule=schedule)), reference)


@nightly("test_handled_settings.py: it is accepted, and passes make the loss")
@pytest.mark.covers("A", ("line", "v"), cross_entropy_loss_fusion=True)
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_a_fused_loss_and_a_divided_vocabulary(schedule: str) -> None:
    flags: dict[str, object] = {
        "pipeline_model_parallel_size": 2,
        "train_iters": 3,
        "pipeline_schedule": schedule,
        "pipeline_vocab_parallel": 2,
    }
    fused = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "native"}
    assert losses(train(2, model_flags(**flags, **fused))) == losses(train(2, model_flags(**flags)))


def _noted(folder: Path, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group")
        if group is not None and dist.get_process_group_ranks(group) in ([0, 1], [2, 3]):
            shapes = [tuple(arg.shape) for arg in args if hasattr(arg, "shape")]
            with open(folder / os.environ["RANK"], "a") as file:
                file.write(f"{name} {shapes} {kwargs.get('async_op', False)}\n")
        return call(*args, **kwargs)

    return noted


@nightly("test_tensor_parallel_communication.py: two ranks of a stack of layers")
@pytest.mark.covers("A", ("line", "v"), tensor_model_parallel_size=2)
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
@pytest.mark.parametrize(
    "scatters",
    [
        pytest.param(True, marks=pytest.mark.covers("A", ("line", "v"), sequence_parallel=True)),
        False,
    ],
)
def test_tensor_parallel_ranks_come_to_communication_in_one_order(
    schedule: str, scatters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags: dict[str, object] = {
        "pipeline_model_parallel_size": 2,
        "tensor_model_parallel_size": 2,
        "sequence_parallel": scatters,
        "train_iters": 2,
        "pipeline_schedule": schedule,
    }
    folder = lasting_folder()
    for module in (layers, mappings):
        for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
            monkeypatch.setattr(module, name, _noted(folder, name, getattr(module, name)))
    monkeypatch.setattr(dist, "all_reduce", _noted(folder, "all_reduce", dist.all_reduce))
    train(4, model_flags(**flags))
    orders = [(folder / str(rank)).read_text().splitlines() for rank in range(4)]
    assert orders[0] == orders[1] and orders[2] == orders[3]
    assert sum(line.endswith("True") for line in orders[0]) > 10, "nothing is in the background"
