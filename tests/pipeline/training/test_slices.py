"""Tests of sequences in slices (``--pipeline-slices``), compared with whole sequences under stock
Megatron.

Slices are summed in another order than whole sequences: float32 gradients differ in the last bits,
by 2e-6 of a tensor's norm at most. All schedules, placements and pipelines of slices are equal to
each other to the last bit. Weights are drawn by their names, so that a model has the same initial
weights under any placement.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, utils
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import MLATransformerConfig

import megatron_ext
from megatron_ext.patches import cpu
from megatron_ext.patches.engine import apply
from tests.helpers import context_parallel
from tests.helpers.adversary import MODES
from tests.helpers.callers import (
    Chunks,
    Gradients,
    draw_by_name,
    first_and_last,
    named_parameters,
    small_config,
    whole_step,
)
from tests.helpers.callers import assert_same as assert_same_step
from tests.helpers.combinations import IS_NIGHT, at_night, nightly
from tests.helpers.drawn_models import drawn_by_name, say_there_is_no_fp8
from tests.helpers.latent_attention import take_local_attention
from tests.helpers.megatron_runs import (
    EXPERTS,
    Run,
    assert_same,
    evaluations,
    losses,
    model_flags,
    predictions,
    train,
)
from tests.helpers.ranks import run_ranks, values
from tests.helpers.sparse_attention import SPARSE, sparse_layers
from tests.patches.adapter.test_slices import LATENT
from tests.pipeline.training.test_recipe_settings import MLA

Flags = dict[str, object]

SEQUENCE, BATCH, VOCABULARY, MICROBATCHES = 16, 2, 32, 4
UNEVEN = "7,5,3,1"

# --- steps of a caller without Megatron's training loop, whose gradients can be read


def average(models: Chunks, *unused: Any, **more: Any) -> None:
    """Average the gradients over the ranks that share sequences (context parallelism)."""
    group = parallel_state.get_context_parallel_group()
    for parameter in (parameter for model in models for parameter in model.parameters()):
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= group.size()


def build() -> Chunks:
    ranks = parallel_state.get_pipeline_model_parallel_world_size()
    config = small_config(
        4,
        ranks,
        num_query_groups=2,
        num_attention_heads=4,
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        finalize_model_grads_func=average,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        **first_and_last(0),
    )
    draw_by_name(named_parameters(model))
    return [model]


def build_sparse() -> Chunks:
    """Return a stage with sparse attention, which attends to tokens that an indexer chooses."""
    config = small_config(
        2,
        parallel_state.get_pipeline_model_parallel_world_size(),
        MLATransformerConfig,
        hidden_size=32,
        num_attention_heads=4,
        apply_rope_fusion=False,
        rope_type="rope",
        **SPARSE,
        **LATENT,
    )
    model = GPTModel(
        config,
        sparse_layers(config),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        **first_and_last(0),
    )
    draw_by_name(named_parameters(model))
    # with small weights the indexer's loss would be mere rounding
    for parameter in model.parameters():
        parameter.data *= 5
    return [model]


def data() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    shape = BATCH, SEQUENCE
    return [torch.randint(VOCABULARY, shape, generator=generator) for _ in range(MICROBATCHES)]


def loss_function(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the mean loss over the tokens that count, on all ranks that share the sequence. No
    slice alone could compute it, so the output must be that of the whole sequence."""
    assert output.shape == mask.shape
    count, shown = mask.sum(), (output.detach() * mask).sum()
    for figure in (count, shown):
        dist.all_reduce(figure, group=parallel_state.get_context_parallel_group())
    return (output * mask).sum() / count, {"loss": (shown / count).item()}


def forward_step(batches: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    tokens = next(batches)
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    batch = {
        "tokens": tokens,
        "position_ids": positions,
        "labels": tokens.roll(-1, 1),
        "loss_mask": (tokens > VOCABULARY // 4).float(),
    }
    group = parallel_state.get_context_parallel_group()
    batch = utils.get_batch_on_this_cp_rank(batch, False, cp_group=group)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, partial(loss_function, batch["loss_mask"])


def step(
    context_parallel: int = 1, build: Callable[[], Chunks] = build, **ours: Any
) -> tuple[list[Any], Gradients]:
    """Run one step of all ranks: stock's, or with our settings ``ours``."""
    with megatron_ext.install(**ours) if ours else contextlib.nullcontext():
        return whole_step(
            build,
            named_parameters,
            forward_step,
            data,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
            context_parallel=context_parallel,
        )


def assert_close_step(
    ours: tuple[list[Any], Gradients], stocks: tuple[list[Any], Gradients]
) -> None:
    (got_losses, gradients), (stock_losses, stock) = ours, stocks
    for got, expected in zip(got_losses, stock_losses, strict=True):
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert gradients.keys() == stock.keys()
    for name, gradient in gradients.items():
        difference = (gradient - stock[name]).norm() / stock[name].norm()
        assert difference < 2e-6, f"{name}: {difference:.1e}"


def steps_of_rank(rank: int) -> None:
    with apply(cpu.patches()):
        stock_losses, stock = step()
        sliced = step(schedule="1f1b", slices="4")
        assert_close_step(sliced, (stock_losses, stock))
        assert_same_step(step(schedule="zb-h1", slices="4"), sliced)


def steps_of_sparse_attention(rank: int) -> None:
    with apply(cpu.patches()):
        stock = step(build=build_sparse)
        sliced = step(build=build_sparse, schedule="1f1b", slices="4", slice_lengths=UNEVEN)
        assert_close_step(sliced, stock)
        split = step(build=build_sparse, schedule="zb-h1", slices="4", slice_lengths=UNEVEN)
        assert_same_step(split, sliced)


def one_step(rank: int) -> tuple[list[Any], Gradients]:
    with apply(cpu.patches()):
        return step(schedule="1f1b", slices="4", slice_lengths=UNEVEN)


def whole_sequences(rank: int) -> tuple[list[Any], Gradients]:
    with apply(cpu.patches()):
        return step()


def shared_sequences(rank: int) -> list[tuple[list[Any], Gradients]]:
    with apply(cpu.patches()):
        return [
            step(2, schedule=schedule, slices="4", slice_lengths=lengths)
            for schedule in ("1f1b", "zb-h1")
            for lengths in ("even", "balanced", "8,4,2,2")
        ]


@nightly("test_ranks_that_share_sequences_have_part_of_each_slice")
def test_ranks_share_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices go together with context parallelism: two pipeline ranks and two context-parallel
    ranks have the gradients of stock with whole sequences."""
    context_parallel.install(monkeypatch, context_parallel.LocalAttention)
    stock, shared = values(run_ranks(2, whole_sequences)), values(run_ranks(4, shared_sequences))
    for made in shared[0]:
        # A loss is the same on both ranks that share its sequence, so half of the list is compared.
        assert_close_step((made[0][:MICROBATCHES], made[1]), stock[0])
    even, balanced, uneven, *others = shared[0]
    for made, same in zip((even, balanced, uneven), others, strict=True):
        assert_same_step(made, same)


@nightly("test_gradients_are_those_of_whole_sequences")
def test_a_longer_pipeline_makes_no_difference() -> None:
    shorter, longer = (values(run_ranks(ranks, one_step)) for ranks in (2, 4))
    assert_same_step(longer[0], shorter[0])


def test_gradients_are_those_of_whole_sequences() -> None:
    """A step in slices of a sequence has the gradients of stock's step, up to the order of sums.
    Two schedules with slices have equal gradients."""
    values(run_ranks(2, steps_of_rank))


def test_sparse_attention_chooses_among_the_keys_of_earlier_slices() -> None:
    """Sparse attention works with slices of a sequence, which used to refuse it. The indexer's keys
    are passed on to later slices, as the keys of attention are."""
    values(run_ranks(2, steps_of_sparse_attention))


# --- trainings by a launch command

TENSOR: Flags = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
FULL: Flags = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
ROUTER: Flags = {
    "moe_z_loss_coeff": 1e-3,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 1e-2,
}
MODELS: dict[str, tuple[int, Flags]] = {
    "grouped queries": (2, {"group_query_attention": True, "num_query_groups": 1}),
    "latent attention": (2, MLA),
    "latent attention, made again": (
        2,
        {
            **MLA,
            "recompute_granularity": "selective",
            "recompute_modules": ("core_attn", "mla_up_proj"),
        },
    ),
    "learned positions, tied": (
        2,
        {
            "position_embedding_type": "learned_absolute",
            "untie_embeddings_and_output_weights": None,
        },
    ),
    "documents apart": (2, {"reset_attention_mask": True, "reset_position_ids": True}),
    "TP 2, sequence parallel": (4, TENSOR),
    "full recompute": (2, FULL),
    "selective recompute": (2, {"recompute_granularity": "selective"}),
    "attention sinks, some sliding windows": (
        2,
        {
            "softmax_type": "learnable",
            "window_size": "5,0",
            "window_attn_skip_freq": 2,
        },
    ),
    "loss per token, swiglu": (2, {"calculate_per_token_loss": True, "swiglu": True}),
    "distributed optimizer": (
        4,
        {
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
        },
    ),
    "bf16": (2, {"bf16": True}),
    "experts": (2, EXPERTS | ROUTER),
    "EP 2, experts by sequence, loss per token": (
        4,
        {
            **EXPERTS,
            **ROUTER,
            "expert_model_parallel_size": 2,
            "moe_router_load_balancing_type": "seq_aux_loss",
            "calculate_per_token_loss": True,
            "recompute_granularity": "selective",
        },
    ),
    "experts, full recompute": (2, EXPERTS | ROUTER | FULL),
    "EP 2, experts by sequence, recomputed": (
        4,
        {
            **EXPERTS,
            **ROUTER,
            "expert_model_parallel_size": 2,
            "moe_router_load_balancing_type": "seq_aux_loss",
            "recompute_granularity": "selective",
            "recompute_modules": ("core_attn", "moe"),
        },
    ),
    "multi-token prediction": (2, {"mtp_num_layers": 2}),
    "multi-token prediction, one layer": (
        2,
        {"mtp_num_layers": 2, "mtp_use_repeated_layer": True, **FULL},
    ),
    "multi-token prediction, experts, tied": (
        2,
        {
            **EXPERTS,
            **ROUTER,
            "mtp_num_layers": 1,
            "untie_embeddings_and_output_weights": None,
            "recompute_granularity": "selective",
        },
    ),
    "TP 2, EP 2, experts": (
        4,
        {
            **EXPERTS,
            **ROUTER,
            **TENSOR,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
        },
    ),
}
# Models on two context-parallel ranks: the number of ranks, and a schedule that must equal 1f1b to
# the last bit. On a V, inner stages get no mask of documents, and gloo sums over replicas in
# another order.
DIVIDED: dict[str, tuple[int, str]] = {
    "grouped queries": (4, "zb-v"),
    "latent attention": (4, "v-half"),
    "documents apart": (4, "zb-h1"),
    "TP 2, sequence parallel": (8, "zb-v"),
    "full recompute": (4, "interleaved-zb"),
    "distributed optimizer": (8, "zb-h1"),
    "bf16": (4, "zb-v"),
    "experts, full recompute": (4, "zb-v"),
    "EP 2, experts by sequence, recomputed": (4, "zb-h1"),
}
PLACED = (
    *("zb-v", "v-half", "interleaved", "interleaved-zb", "slimpipe", "breadth-first"),
    *("gis", "hanayo:waves=1", "dualpipe-v", "v-auto", "loop-auto"),
)
SAME = [
    *((model, "zb-h1") for model in MODELS),
    *(("grouped queries", schedule) for schedule in ("gpipe", "2bp", "zb-2p", "zb-auto", *PLACED)),
    ("TP 2, sequence parallel", "zb-v"),
    ("full recompute", "interleaved-zb"),
    ("distributed optimizer", "v-half"),
    ("bf16", "zb-v"),
    ("experts", "zb-v"),
    ("experts, full recompute", "zb-v"),
    ("multi-token prediction, one layer", "zb-v"),
    ("multi-token prediction", "zb-v"),
    ("EP 2, experts by sequence, loss per token", "interleaved-zb"),
]
# Weight gradients of these models wait in the queue in different ways: once, twice, or from
# recomputed passes.
JOINED = (
    *("learned positions, tied", "full recompute", "bf16", "experts", "experts, full recompute"),
    *("distributed optimizer", "multi-token prediction, one layer", "TP 2, EP 2, experts"),
)
SLICED: Flags = {"pipeline_slices": 4}
BALANCED: Flags = {"pipeline_slice_lengths": "balanced"}


def on_the_cpu_drawn_by_name(*args: Any, **kwargs: Any) -> Any:
    """Return a chunk of `drawn_by_name` in which latent attention runs on the CPU."""
    take_local_attention()
    say_there_is_no_fp8()
    return drawn_by_name(*args, **kwargs)


def run(model: str, **more: object) -> list[Run]:
    return run_on(MODELS[model][0], model, **more)


def run_on(ranks: int, model: str, **more: object) -> list[Run]:
    flags = {
        "pipeline_model_parallel_size": 2,
        "untie_embeddings_and_output_weights": True,
        "position_embedding_type": "rope",
        # By day each step has two microbatches for each pipeline rank, as trainings of other tests
        # have.
        "global_batch_size": 8 if IS_NIGHT else 4,
        "train_iters": 3,
        "eval_iters": 1,
        "eval_interval": 2,
        **MODELS[model][1],
        **more,
    }
    # a tied table has two names, so weights cannot be drawn by name
    is_tied = flags["untie_embeddings_and_output_weights"] is None
    provider = None if is_tied else on_the_cpu_drawn_by_name
    return train(ranks, model_flags(**flags), model_provider=provider)


@functools.cache
def stock(model: str) -> list[Run]:
    return run(model)


@functools.cache
def sliced(model: str) -> list[Run]:
    """Return a run in slices under 1f1b, with which runs under other schedules are compared."""
    return run(model, pipeline_schedule="1f1b", **SLICED)


def assert_close(runs: list[Run], reference: list[Run], tolerance: float) -> None:
    assert {run.schedule for run in runs} == {"PipelineStep"}
    for ours, theirs in (
        (losses(runs), losses(reference)),
        (evaluations(runs), evaluations(reference)),
    ):
        assert ours == pytest.approx(theirs[-len(ours) :], rel=tolerance) and ours


@nightly("test_a_launch_command_trains_as_stock_does")
@pytest.mark.parametrize("slices", [2, 4, 8])
def test_twenty_steps_side_by_side(slices: int) -> None:
    """Twenty steps in slices have stock's losses to 1e-5 in every step, so differences of float32
    sums do not grow."""
    model = "grouped queries"
    reference = losses(run(model, train_iters=20))
    runs = run(model, train_iters=20, pipeline_schedule="zb-h1", pipeline_slices=slices)
    assert losses(runs) == pytest.approx(reference, rel=1e-5) and len(reference) == 20


def test_a_launch_command_trains_as_stock_does() -> None:
    """A launch command with slices of 7, 5, 3 and 1 tokens trains as stock does."""
    uneven: Flags = {"pipeline_slices": 4, "pipeline_slice_lengths": UNEVEN}
    runs = run("grouped queries", pipeline_schedule="zb-h1", **uneven)
    assert_close(runs, stock("grouped queries"), 1e-5)


@nightly("test_gradients_are_those_of_whole_sequences")
@pytest.mark.parametrize("model", MODELS)
def test_it_is_stock_but_for_the_order_of_sums(
    model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Trainings in slices equal stock's up to the order of sums. The losses of experts in
    Megatron's log are compared too."""
    for made in (stock, sliced):
        made.cache_clear()  # the run must print its output again
    expected = stock(model)
    said = of_experts(capfd.readouterr().out)
    tolerance = 1e-2 if model == "bf16" else 1e-4
    runs = sliced(model)
    assert_close(runs, expected, tolerance)
    for ours, stocks in zip(predictions(runs), predictions(expected), strict=True):
        assert ours == pytest.approx(stocks, rel=1e-4)
    assert of_experts(capfd.readouterr().out) == pytest.approx(said, rel=1e-4)
    assert bool(said) == ("experts" in model)


def of_experts(output: str) -> list[float]:
    """Return the losses of routers in Megatron's log."""
    return [float(loss) for loss in re.findall(r"(?:load_balancing|z)_loss: (\S+)", output)]


@nightly("test_gradients_are_those_of_whole_sequences")
@pytest.mark.parametrize(("model", "schedule"), SAME)
def test_all_schedules_are_the_same_to_the_last_bit(model: str, schedule: str) -> None:
    runs = run(model, pipeline_schedule=schedule, **SLICED)
    assert_same(runs, sliced(model))


@pytest.mark.parametrize(
    "model", at_night("TP 2, sequence parallel", *JOINED) or ("grouped queries",)
)
def test_joined_weights_are_those_of_whole_sequences(model: str) -> None:
    """With --pipeline-join-slice-weights the weight gradients of a microbatch are one product over
    all of its slices, and equal those of whole sequences up to rounding."""
    runs = run(model, pipeline_schedule="zb-h1", pipeline_join_slice_weights=True, **SLICED)
    assert_close(runs, stock(model), 1e-2 if model == "bf16" else 1e-4)


@nightly("test_joined_weights_are_those_of_whole_sequences")
@pytest.mark.parametrize(
    "more",
    [
        {"pipeline_schedule": "zb-v"},
        {"pipeline_schedule": "dualpipe-v"},
        {"pipeline_schedule": "zb-h1", "pipeline_recompute": "first:1"},
        {"pipeline_schedule": "v-half"},
    ],
    ids=["zb-v", "whole backward passes", "recompute", "v-half"],
)
def test_joined_weights_are_the_same_to_the_last_bit(more: Flags) -> None:
    """With --pipeline-join-slice-weights, other schedules and recomputed passes have the same
    numbers to the last bit. Schedules with whole backward passes (I and W together) split them for
    this setting."""
    joined: Flags = {**SLICED, "pipeline_join_slice_weights": True}
    expected = run("grouped queries", pipeline_schedule="zb-h1", **joined)
    assert_same(run("grouped queries", **joined, **more), expected)


@nightly("test_ranks_that_share_sequences_have_part_of_each_slice")
@pytest.mark.parametrize("model", DIVIDED)
def test_ranks_that_share_sequences_train_as_stock_on_whole_ones(
    model: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices on two context-parallel ranks train as stock on whole sequences, also with slice
    lengths that balance the work of attention."""
    stock.cache_clear()  # the run must print its output again
    expected = stock(model)
    said = of_experts(capfd.readouterr().out)
    context_parallel.install(monkeypatch, context_parallel.LocalAttention)
    ranks, other = DIVIDED[model]
    divided: Flags = {**SLICED, "context_parallel_size": 2}
    lines = [
        run_on(ranks, model, pipeline_schedule=schedule, **divided, **lengths)
        for schedule, lengths in (("1f1b", {}), (other, {}), ("1f1b", BALANCED))
    ]
    for runs in lines:
        assert_close(runs, expected, 1e-2 if model == "bf16" else 1e-4)
    assert of_experts(capfd.readouterr().out) == pytest.approx(said * 3, rel=1e-4)
    assert_same(lines[1], lines[0])


@nightly("test_adversary_training.py has schedules without")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v", "v-half", "v-min", "interleaved"])
def test_on_ranks_whose_device_stands_still_or_is_late(schedule: str, mode: str) -> None:
    with MODES[mode]():
        runs = run("grouped queries", pipeline_schedule=schedule, **SLICED)
    assert_same(runs, sliced("grouped queries"))


@nightly("test_batched.py has it without")
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_batched_messages(schedule: str) -> None:
    model = "grouped queries"
    runs = run(model, pipeline_schedule=schedule, pipeline_p2p="batched", **SLICED)
    assert_same(runs, sliced(model))


@nightly("test_checkpoints.py has them without")
def test_a_checkpoint_goes_on_with_slices_and_without(tmp_path: Path) -> None:
    """A checkpoint of a run in slices contains nothing of slices, so a run may resume it with or
    without them."""
    model = "distributed optimizer"
    more: Flags = {"save_interval": 2, "dist_ckpt_optim_fully_reshardable": True}
    whole = run(model, pipeline_schedule="zb-h1", save=tmp_path, **more, **SLICED)
    assert_same(whole, sliced(model))
    resumed: Flags = {"load": tmp_path, "ckpt_step": 2}
    runs = run(model, pipeline_schedule="1f1b", **resumed, **SLICED)
    assert len(losses(runs)) == 1
    assert_same(runs, whole)
    assert losses(run(model, **resumed)) == pytest.approx(losses(runs), rel=1e-4)


@nightly("test_recompute.py has it without")
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
@pytest.mark.parametrize("model", ["grouped queries", "experts"])
def test_recomputed_passes(schedule: str, model: str) -> None:
    """Recomputed slices train with the same numbers. The first pass of a slice stores its keys and
    values for later slices, and the recomputed pass overwrites them with the same ones."""
    stages = 4 if schedule == "zb-v" else 2
    again: Flags = {"pipeline_recompute": f"first:{stages}"}
    assert_same(run(model, pipeline_schedule=schedule, **again, **SLICED), sliced(model))


@nightly("test_it_is_stock_but_for_the_order_of_sums")
def test_one_slice_is_a_whole_sequence() -> None:
    model = "grouped queries"
    assert_same(run(model, pipeline_schedule="zb-h1", pipeline_slices=1), stock(model))


@nightly("test_trace.py and test_metrics.py have them without")
def test_slices_are_traced_and_measured(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    watched: Flags = {
        "pipeline_trace": tmp_path,
        "pipeline_trace_iters": "2:3",
        "pipeline_metrics": True,
    }
    model = "grouped queries"
    assert_same(run(model, pipeline_schedule="zb-h1", **watched, **SLICED), sliced(model))
    assert '"0F0.3"' in (tmp_path / "trace.json").read_text()
    assert "bubble" in capfd.readouterr().out
