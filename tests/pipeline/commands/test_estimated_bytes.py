"""Tests that estimated bytes of a microbatch equal those counted in a training without a GPU.

The layers are Megatron's local ones, with torch's kernels. On a GPU Transformer Engine's attention
stores no attention matrix, its RMSNorm stores its input once, and its rotary positions store no
tables.

The training also counts the microbatch's own tokens and mask, which are no activations and matter
if all layers are recomputed. torch's dropout stores a mask of booleans on a GPU, and on the CPU a
tensor of its input's type.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.adapter.arguments import settle_vocabulary
from megatron_ext.adapter.stock.stock_passes import StockPasses
from megatron_ext.compile.registry import choose
from megatron_ext.config import PipelineConfig
from megatron_ext.launch.command import megatron_arguments
from megatron_ext.runtime.held_bytes import SavedTensors
from megatron_ext.runtime.measure.profile import STEPS
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.schedule.costs_text import load_costs
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.placement import Placement
from tests.helpers.combinations import at_night
from tests.helpers.estimated import costs_of_arguments
from tests.helpers.fetched import megatron_sources
from tests.helpers.latent_attention import take_local_attention
from tests.helpers.megatron_runs import model_flags, train
from tests.patches.launch.test_model_bytes import EXPERTS, LATENT, LLAMA

COMMON: dict[str, Any] = {
    "pipeline_model_parallel_size": 2,
    "hidden_size": 96,
    "num_attention_heads": 4,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "micro_batch_size": 2,
    "train_iters": STEPS + 1,
    "rerun_mode": "disabled",
    "transformer_impl": "local",
}
# Bytes of a microbatch's tokens and of the mask that Megatron's loader makes for each sample.
DATA = 2 * 64 * 8 + 2 * 64 * 64
ALONE: dict[str, Any] = EXPERTS | {"expert_model_parallel_size": None, "moe_layer_freq": 1}
FULL: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def again(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": modules}


def grouped(groups: int, **more: Any) -> dict[str, Any]:
    """Return flags of a Llama model with ``groups`` query groups for its 4 heads."""
    return LLAMA | {"num_query_groups": groups} | more


MODELS: dict[str, dict[str, Any]] = {
    "GPT": {},
    "GPT, rotary positions, norms of queries and keys": {
        "position_embedding_type": "rope",
        "qk_layernorm": True,
    },
    "GPT, grouped queries": {"group_query_attention": True, "num_query_groups": 2},
    "GPT, grouped queries, core_attn": {"group_query_attention": True, "num_query_groups": 2}
    | again("core_attn"),
    "Llama, as many groups as heads": grouped(4),
    "Llama, as many groups as heads, core_attn": grouped(4) | again("core_attn"),
    "Llama, one group, bf16, norms of queries and keys": grouped(1, bf16=True, qk_layernorm=True),
    "one group, learned positions": grouped(1, position_embedding_type="learned_absolute"),
    "GPT, dropout": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "Llama, bf16": LLAMA | {"bf16": True},
    "norms of queries and keys": LLAMA | {"qk_layernorm": True},
    "latent attention": LLAMA | LATENT,
    "full recompute": LLAMA | FULL,
    "core_attn": LLAMA | again("core_attn"),
    "mlp": LLAMA | again("mlp"),
    "moe": ALONE | again("moe"),
}


def dropout_of_a_gpu(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """Stand-in for torch's dropout that stores a mask of booleans, as on GPUs."""
    return torch.native_dropout(input, p, True)[0] if training and p else input


@pytest.mark.parametrize("name", ["experts", *at_night(*MODELS)])
def test_held_bytes_are_those_of_a_training(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Estimated bytes of a microbatch equal those that a training stores: to 0.1 % for bytes that
    stay until W, and to 3 % for bytes that stay until I."""
    take_local_attention()
    monkeypatch.setattr(torch.nn.functional, "dropout", dropout_of_a_gpu)
    flags = COMMON | (MODELS | {"experts": ALONE})[name]
    path, placement = tmp_path / "costs.json", choose("zb-h1").place(2)
    costs = {"pipeline_schedule": "zb-h1", "pipeline_costs": f"profile:{path}"}
    train(2, model_flags(**flags | costs))
    counted = load_costs(path, placement).held_bytes
    args = megatron_arguments.parse_arguments(model_flags(**flags)).args
    with megatron_arguments.on_gpus(args):
        megatron_arguments.validate(args, PipelineConfig(), 2)
        settle_vocabulary(args, PipelineConfig(), args.vocab_size)
        estimated = costs_of_arguments(args, placement).held_bytes
    assert counted is not None and estimated is not None
    waits, holds = Held.WEIGHT_INPUTS, Held.ACTIVATION
    assert estimated[waits] == pytest.approx(counted[waits], rel=1e-3)
    of_layers = [held - DATA for held in counted[holds]]
    print("HELD", name, list(estimated[holds]), of_layers)
    assert estimated[holds] == pytest.approx(of_layers, rel=0.03)


def count_in_stock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch Megatron's own schedule so that each rank writes the bytes its stage stores for a
    microbatch."""
    begin, end = StockPasses.__init__, Recorder.end

    def counting(self: StockPasses, recorder: Recorder, placement: Placement) -> None:
        begin(self, recorder, placement)
        weights = (held for held in gc.get_objects() if isinstance(held, torch.nn.Parameter))
        recorder.counting = SavedTensors(weights)

    def write(self: Recorder) -> None:
        if isinstance(self.counting, SavedTensors):
            ((_, held),) = self.counting.per_microbatch().items()
            (folder / str(self.rank)).write_text(str(held))
            self.counting = None
        end(self)

    monkeypatch.setattr(StockPasses, "__init__", counting)
    monkeypatch.setattr(Recorder, "end", write)


@pytest.mark.parametrize(
    "layout", ["Et|tm|L", *at_night("Et|tmL", "Et|t|mmL", "Et|mmL", "Et|t|mm|L")]
)
def test_multi_token_prediction_holds_what_a_training_does(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Estimated bytes of multi-token prediction equal those that a training stores. The estimate
    used to omit the last norm of each prediction depth, and the inputs of all calls of the output
    layer but the first. It also used to count the final norm on the stage of the loss, although the
    norm is on the stage of the last layer."""
    count_in_stock(tmp_path, monkeypatch)
    ranks = layout.count("|") + 1
    flags: dict[str, Any] = COMMON | {
        "pipeline_model_parallel_size": ranks,
        "pipeline_model_parallel_layout": layout,
        "mtp_num_layers": layout.count("m"),
        "num_layers": layout.count("t"),
        "position_embedding_type": "none",
        "train_iters": 2,
    }
    script = megatron_sources() / "pretrain_gpt.py"
    traced = {"pipeline_trace": tmp_path / "traces", "pipeline_trace_iters": "1:2"}
    train(ranks, model_flags(**flags | traced), script)
    counted = [float((tmp_path / str(rank)).read_text()) for rank in range(ranks)]
    args = megatron_arguments.parse_arguments(model_flags(**flags)).args
    with megatron_arguments.on_gpus(args):
        megatron_arguments.validate(args, PipelineConfig(), ranks)
        settle_vocabulary(args, PipelineConfig(), args.vocab_size)
        estimated = costs_of_arguments(args, choose("1f1b").place(ranks)).held_bytes
    assert estimated is not None
    # The tensors that each depth shifts (tokens, positions, a mask) do not count as activations. A
    # hidden state has 49,152 bytes.
    for held, told in zip(counted, estimated[Held.ACTIVATION], strict=True):
        assert 0 <= held - told <= 3 * DATA
