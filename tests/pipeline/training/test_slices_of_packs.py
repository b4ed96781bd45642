"""Tests of packed sequences in slices, compared with whole packs under stock Megatron.

The packs are those of ``--sft``, ``--dataloader-inter-document-masking`` and callers. Slices are
cut anywhere, not only between documents. The numbers are those of whole packs up to the order of
sums, and the same under all schedules to the last bit. Attention runs document by document, with
the arguments that Transformer Engine's attention gets.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

import megatron_ext
from megatron_ext.patches import cpu
from megatron_ext.patches.engine import apply
from tests.helpers.callers import assert_same as assert_same_steps
from tests.helpers.combinations import IS_NIGHT, nightly
from tests.helpers.drawn_models import drawn_by_name
from tests.helpers.fetched import megatron_sources
from tests.helpers.megatron_runs import (
    Run,
    assert_same,
    evaluations,
    losses,
    model_flags,
    predictions,
    train,
)
from tests.helpers.packed import sliced_packs_on_the_cpu
from tests.helpers.ranks import run_ranks, values
from tests.pipeline.training import test_packed_sequences as packed
from tests.pipeline.training.test_multi_token_prediction import EXPERTS, FULL
from tests.pipeline.training.test_packed_sequences import (
    CONVERSATIONS,
    DOCUMENTS,
    PER_TOKEN,
    PREDICTING,
)
from tests.pipeline.training.test_recipe_settings import MLA
from tests.pipeline.training.test_slices import ROUTER, TENSOR, assert_close_step

Flags = dict[str, object]


@pytest.fixture(autouse=True)
def _attention_over_documents() -> Iterator[None]:
    with sliced_packs_on_the_cpu():
        yield


# --- steps of a caller without Megatron's training loop, whose gradients can be read

# Packs of 12 tokens: with one document over all slices, with documents that end where a slice ends,
# with a slice that ends one token into a document, and with empty documents.
PACKS = [[5, 4, 3], [12], [1, 8, 3], [4, 8], [2, 2, 0, 2, 6, 0]]
LENGTHS = "5,3,3,1"


def steps_of_rank(rank: int) -> None:
    step = functools.partial(packed.step, PACKS, 1)
    with apply(cpu.patches()):
        stock = step()
        made = []
        for schedule in ("zb-h1", "interleaved-zb", "zb-v"):
            with megatron_ext.install(schedule=schedule, slices="4", slice_lengths=LENGTHS):
                made.append(step())
    for ours in made:
        assert_close_step(ours, stock)
        assert_same_steps(ours, made[0])


def test_gradients_are_those_of_whole_packs() -> None:
    """Packed sequences in slices, with multi-token prediction, have the gradients of whole packs up
    to the order of sums."""
    values(run_ranks(packed.RANKS, steps_of_rank))


# --- trainings by a launch command

UNEVEN: Flags = {"pipeline_slices": 4, "pipeline_slice_lengths": "7,5,3,1"}
SLICED: Flags = {"pipeline_slices": 4}
BY_SEQUENCE: Flags = {"moe_router_load_balancing_type": "seq_aux_loss"}
MODELS: dict[str, tuple[int, Flags]] = {
    "conversations": (2, CONVERSATIONS),
    "conversations, loss per token, 2 depths": (
        2,
        {**CONVERSATIONS, **PER_TOKEN, "mtp_num_layers": 2},
    ),
    "conversations, 1 depth, full recompute": (2, {**CONVERSATIONS, **PREDICTING, **FULL}),
    "conversations, selective recompute": (
        2,
        {**CONVERSATIONS, "recompute_granularity": "selective"},
    ),
    "conversations, learned positions": (
        2,
        {**CONVERSATIONS, "position_embedding_type": "learned_absolute"},
    ),
    "conversations, latent attention": (2, {**CONVERSATIONS, **MLA}),
    "conversations, grouped queries, bf16": (
        2,
        {**CONVERSATIONS, "group_query_attention": True, "num_query_groups": 1, "bf16": True},
    ),
    "conversations, TP 2, sequence parallel, 1 depth": (
        4,
        {**CONVERSATIONS, **TENSOR, **PREDICTING},
    ),
    "conversations, experts": (2, {**CONVERSATIONS, **EXPERTS, **ROUTER}),
    "conversations, EP 2, experts by sequence, loss per token, recomputed": (
        4,
        {
            **CONVERSATIONS,
            **EXPERTS,
            **ROUTER,
            **BY_SEQUENCE,
            **PER_TOKEN,
            **FULL,
            "expert_model_parallel_size": 2,
        },
    ),
    "conversations, distributed optimizer": (
        4,
        {
            **CONVERSATIONS,
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
        },
    ),
    "documents": (2, DOCUMENTS),
    "documents, loss per token, 1 depth": (2, {**DOCUMENTS, **PER_TOKEN, **PREDICTING}),
}


SCHEDULES = ("zb-h1", "interleaved-zb", "zb-v", "v-half")
SAME = [
    *(("conversations", schedule) for schedule in SCHEDULES),
    *zip([*MODELS][1:], itertools.cycle(SCHEDULES), strict=False),
]


def run(model: str, **more: object) -> list[Run]:
    ranks, settings = MODELS[model]
    flags = {
        "pipeline_model_parallel_size": 2,
        "num_layers": 4,
        "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": True,
        # By day each step has two microbatches for each pipeline rank, as trainings of other tests
        # have.
        "global_batch_size": 8 if IS_NIGHT else 4,
        "train_iters": 3,
        "eval_interval": 3,
        "eval_iters": 1,
        **settings,
        **more,
    }
    return train(ranks, model_flags(**flags), model_provider=drawn_by_name)


@functools.cache
def stock(model: str) -> list[Run]:
    return run(model)


@functools.cache
def sliced(model: str) -> list[Run]:
    """Return a run in slices under 1f1b, with which runs under other schedules are compared."""
    return run(model, pipeline_schedule="1f1b", **SLICED)


def assert_close(runs: list[Run], reference: list[Run], tolerance: float = 1e-6) -> None:
    assert {run.schedule for run in runs} == {"PipelineStep"}
    for of_run in (losses, evaluations):
        assert of_run(runs) == pytest.approx(of_run(reference), rel=tolerance) and of_run(runs)
    for ours, stocks in zip(predictions(runs), predictions(reference), strict=True):
        assert ours == pytest.approx(stocks, rel=tolerance)


def test_a_launch_command_trains_as_stock_does() -> None:
    """A launch command with packs in slices of 7, 5, 3 and 1 tokens trains as stock does:
    Megatron's conversations (--sft) with multi-token prediction. Such packs used to be refused."""
    model = "conversations, loss per token, 2 depths"
    runs = run(model, pipeline_schedule="zb-v", **UNEVEN)
    assert predictions(runs)
    assert_close(runs, stock(model))


@nightly("test_a_launch_command_trains_as_stock_does")
@pytest.mark.parametrize(("model", "slices"), [("conversations", 2), ("documents", 4)])
def test_twenty_steps_side_by_side(model: str, slices: int) -> None:
    longer: Flags = {"train_iters": 20, "global_batch_size": 4}
    reference = run(model, **longer)
    runs = run(model, pipeline_schedule="zb-h1", pipeline_slices=slices, **longer)
    assert_close(runs, reference)
    assert len(losses(runs)) == 20


@nightly("test_gradients_are_those_of_whole_packs")
@pytest.mark.parametrize("model", MODELS)
def test_it_is_stock_but_for_the_order_of_sums(model: str) -> None:
    """Trainings on packs in slices equal stock's up to the order of sums. Rounding grows with
    experts, because Adam's steps are as large for small gradients as for large ones."""
    tolerance = 1e-2 if "bf16" in model else 1e-5 if "experts by sequence" in model else 1e-6
    assert_close(sliced(model), stock(model), tolerance)


@nightly("test_gradients_are_those_of_whole_packs")
@pytest.mark.parametrize(("model", "schedule"), SAME)
def test_all_schedules_are_the_same_to_the_last_bit(model: str, schedule: str) -> None:
    assert_same(run(model, pipeline_schedule=schedule, **SLICED), sliced(model))


OURS: dict[str, Flags] = {
    "offload": {"pipeline_activation_offload": "full"},
    "recompute": {"pipeline_recompute": "first:2"},
    "batched": {"pipeline_p2p": "batched"},
}


@nightly("test_slices.py has them without packs")
@pytest.mark.parametrize(
    ("model", "setting"),
    [
        ("conversations, experts", "recompute"),
        ("documents", "recompute"),
        ("documents, loss per token, 1 depth", "offload"),
        ("conversations", "batched"),
    ],
)
def test_with_other_settings_of_ours(model: str, setting: str) -> None:
    assert_same(run(model, pipeline_schedule="zb-h1", **SLICED, **OURS[setting]), sliced(model))


@nightly("test_it_is_stock_but_for_the_order_of_sums")
def test_one_slice_is_a_whole_pack() -> None:
    model = "conversations"
    assert_same(run(model, pipeline_schedule="zb-h1", pipeline_slices=1), stock(model))


@nightly("test_gradients_are_those_of_whole_packs has them in packs of its own")
@pytest.mark.parametrize("limit", [2, 64])
def test_the_shortest_and_the_longest_documents(limit: int) -> None:
    """Packs in slices train as stock with documents of one token, and with documents longer than a
    pack."""
    with mock.patch.object(MockGPTLowLevelDataset, "max_sequence_length", limit):
        reference = run("documents")
        runs = run("documents", pipeline_schedule="zb-v", **UNEVEN)
    assert_close(runs, reference)


@nightly("test_a_launch_command_trains_as_stock_does")
@pytest.mark.parametrize("data", [CONVERSATIONS, DOCUMENTS], ids=["conversations", "documents"])
def test_the_upstream_script(data: Flags, tmp_path: Any) -> None:
    script = megatron_sources() / "pretrain_gpt.py"
    common: Flags = {
        "pipeline_model_parallel_size": 2,
        "num_layers": 4,
        "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": True,
        "train_iters": 3,
        "eval_interval": 3,
        "eval_iters": 1,
        **data,
        **PREDICTING,
    }
    reference = train(2, model_flags(**common, save=tmp_path, save_interval=1), script)
    resumed: Flags = {"load": tmp_path, "ckpt_step": 1, "pipeline_schedule": "zb-h1"}
    runs = train(2, model_flags(**common, **resumed, **UNEVEN), script)
    assert losses(runs) == pytest.approx(losses(reference)[1:], rel=1e-6) and len(losses(runs)) == 2
