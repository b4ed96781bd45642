"""Tests of packed sequences under every placement, compared with stock Megatron to the last bit.

Every stage reads where the sequences of a microbatch begin and end, each chunk of a rank from an
iterator of its own. The first stage reads the tokens and the last one the labels; on a V these two
stages are on one rank. Attention is Megatron's own, sequence by sequence.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from torch import Tensor

import megatron_ext
from megatron_ext.patches import cpu
from megatron_ext.patches.engine import apply
from tests.helpers.callers import (
    Gradients,
    assert_same,
    draw_by_name,
    first_and_last,
    named_parameters,
    small_config,
    whole_step,
)
from tests.helpers.combinations import at_night, nightly
from tests.helpers.drawn_models import drawn_by_name
from tests.helpers.fetched import megatron_sources
from tests.helpers.megatron_runs import Run, losses, model_flags, predictions, train
from tests.helpers.megatron_runs import assert_same as assert_same_runs
from tests.helpers.packed import packed_on_the_cpu, packed_params
from tests.helpers.ranks import run_ranks, values
from tests.pipeline.features.test_vocabulary_training import assert_close, training
from tests.pipeline.training.test_multi_token_prediction import EXPERTS, FULL

Flags = dict[str, object]


@pytest.fixture(autouse=True)
def _attention_by_sequence() -> Iterator[None]:
    with packed_on_the_cpu():
        yield


# --- Megatron's own loop, with its datasets, its batches for each stage and its loss

CONVERSATIONS: Flags = {
    "sft": True,
    "no_create_attention_mask_in_dataloader": True,
    "null_tokenizer_pad_id": 0,
}
DOCUMENTS: Flags = {"dataloader_inter_document_masking": True}
PER_TOKEN: Flags = {"calculate_per_token_loss": True}
PREDICTING: Flags = {"mtp_num_layers": 1}
MODELS: dict[str, Flags] = {
    "conversations": CONVERSATIONS,
    "conversations, loss per token, 1 depth": {**CONVERSATIONS, **PER_TOKEN, **PREDICTING},
    "conversations, experts, loss per token, bf16": {
        **CONVERSATIONS,
        **PER_TOKEN,
        **EXPERTS,
        "bf16": True,
    },
    "conversations, full recompute": {**CONVERSATIONS, **FULL},
    "conversations, 2 depths, selective recompute": {
        **CONVERSATIONS,
        "mtp_num_layers": 2,
        "recompute_granularity": "selective",
    },
    "documents, loss per token": {**DOCUMENTS, **PER_TOKEN},
    "documents, 1 depth": {**DOCUMENTS, **PREDICTING},
}
KINDS = {"zb-h1": "line", "interleaved-zb": "loop", "zb-v": "v", "v-half": "v", "hanayo": "v"}
DAY = {("conversations, loss per token, 1 depth", "zb-v")}


SHOWN = (
    *("mtp_num_layers", "calculate_per_token_loss", "recompute_granularity", "num_experts"),
    *("tensor_model_parallel_size", "sequence_parallel", "expert_model_parallel_size"),
    *("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"),
)


def covers(schedule: str, settings: Flags) -> pytest.MarkDecorator:
    shown = {name: value for name, value in settings.items() if name in SHOWN}
    return pytest.mark.covers("B", (KINDS[schedule],), packed=True, **shown)


CASES = [
    pytest.param(model, schedule, marks=covers(schedule, MODELS[model]))
    for model, schedule in itertools.product(MODELS, KINDS)
    if (model, schedule) in DAY or at_night((model, schedule))
]


def flags(**more: object) -> list[str]:
    return model_flags(
        **{
            "pipeline_model_parallel_size": 2,
            "num_layers": 8,
            "position_embedding_type": "rope",
            "untie_embeddings_and_output_weights": True,
            "train_iters": 3,
            "eval_interval": 3,
            "eval_iters": 1,
            **more,
        }
    )


@functools.cache
def stock(model: str) -> list[Run]:
    return train(2, flags(**MODELS[model]), model_provider=drawn_by_name)


@pytest.mark.parametrize(("model", "schedule"), CASES)
def test_it_is_stock_to_the_last_bit(model: str, schedule: str) -> None:
    reference = stock(model)
    assert len(set(losses(reference))) == 3
    ours = flags(**MODELS[model], pipeline_schedule=schedule)
    runs = train(2, ours, model_provider=drawn_by_name)
    assert {run.schedule for run in runs} == {"PipelineStep"}
    assert bool(predictions(runs)) == ("mtp_num_layers" in MODELS[model])
    assert_same_runs(runs, reference)


@nightly("stock cannot show it: on several ranks it expects a row for each sample")
@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved-zb", "zb-v"])
@pytest.mark.parametrize("data", [CONVERSATIONS, DOCUMENTS], ids=["conversations", "documents"])
def test_several_samples_make_one_row(data: Flags, schedule: str) -> None:
    """Several packed samples of a microbatch become one row, as in stock on one rank."""
    common: Flags = {**data, **PER_TOKEN, "micro_batch_size": 2}
    alone = flags(**common, pipeline_model_parallel_size=1)
    reference = train(1, alone, model_provider=drawn_by_name)
    ours = flags(**common, pipeline_schedule=schedule)
    assert_same_runs(train(2, ours, model_provider=drawn_by_name), reference)


@nightly("a caller's model is divided by day")
@pytest.mark.covers("B", ("line", "v"), sft=True)
@pytest.mark.parametrize(
    ("schedule", "variant", "per_token"),
    [("zb-h1", 1, False), ("zb-v", 2, False), ("v-half", 1, True)],
)
def test_with_the_vocabulary_divided(schedule: str, variant: int, per_token: bool) -> None:
    """Packed sequences train with a vocabulary split over the ranks. The label of a token without a
    loss is outside every rank's part of the vocabulary."""
    more: Flags = {"position_embedding_type": "rope", "calculate_per_token_loss": per_token}
    # stock accepts one pack a microbatch
    setting = training(2, 2, CONVERSATIONS | more | {"micro_batch_size": 1})
    reference, folder = setting.saved()
    ours: Flags = {"pipeline_schedule": schedule, "pipeline_vocab_parallel": variant}
    runs, _ = setting.saved(load=folder, ckpt_step=1, **ours)
    assert_close(runs, reference)


PARALLEL: dict[str, Flags] = {
    "TP2, SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "DP2, distributed optimizer, both overlaps": {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "dist_ckpt_optim_fully_reshardable": True,
    },
    "EP2": {**EXPERTS, "expert_model_parallel_size": 2},
    "offload": {"pipeline_activation_offload": "full"},
}


@nightly("what is parallel besides meets every placement in test_matrix.py")
@pytest.mark.parametrize(
    ("setting", "schedule"),
    [
        pytest.param(
            setting,
            schedule,
            marks=covers(schedule, {**PER_TOKEN, **PREDICTING, **PARALLEL[setting]}),
        )
        for setting, schedule in itertools.product(PARALLEL, ("zb-h1", "interleaved-zb", "zb-v"))
    ],
)
def test_packed_sequences_with_other_parallelism(
    setting: str, schedule: str, tmp_path: Path
) -> None:
    """Packed sequences train together with tensor, expert or data parallelism, or with offload.
    In a tensor-parallel group only the first rank reads data, and passes them on to the other
    ranks."""
    common: Flags = {**CONVERSATIONS, **PER_TOKEN, **PREDICTING, **PARALLEL[setting]}
    ranks = 2 if setting == "offload" else 4
    offload = {"pipeline_activation_offload": common.pop("pipeline_activation_offload", None)}
    reference = train(ranks, flags(**common, save=tmp_path, save_interval=1))
    resumed = {"load": tmp_path, "ckpt_step": 1, "pipeline_schedule": schedule}
    runs = train(ranks, flags(**common, **resumed, **offload))
    assert len(losses(runs)) == len(losses(reference)) - 1
    assert_same_runs(runs, reference)


@pytest.mark.parametrize("schedule", ["interleaved-zb", *at_night("zb-h1", "zb-v")])
@pytest.mark.parametrize(
    "data",
    [
        pytest.param(DOCUMENTS, id="documents"),
        *at_night(pytest.param(CONVERSATIONS, id="conversations")),
    ],
)
def test_the_upstream_script(data: Flags, schedule: str, tmp_path: Path) -> None:
    """Megatron's pretrain_gpt.py trains on packed sequences under our schedules. It builds datasets
    of documents for the first and the last stage only, so the other chunks of a loop used to have
    nothing to read."""
    script = megatron_sources() / "pretrain_gpt.py"
    common: Flags = {**data, **PER_TOKEN, **PREDICTING}
    reference = train(2, flags(**common, save=tmp_path, save_interval=1), script)
    resumed = {"load": tmp_path, "ckpt_step": 1, "pipeline_schedule": schedule}
    runs = train(2, flags(**common, **resumed), script)
    assert {run.schedule for run in runs} == {"PipelineStep"}
    assert len(losses(runs)) == len(losses(reference)) - 1 and predictions(runs)
    assert_same_runs(runs, reference)


# --- code that calls Megatron's schedule itself, with batches packed as in Megatron-Bridge

RANKS, LAYERS, VOCABULARY, LONGEST = 2, 4, 32, 12
LENGTHS = [[5, 4, 3], [12], [1, 8, 3], [6, 6], [2, 2, 2, 6]]
VARYING = [*LENGTHS[:2], [3, 4], [8, 2], [4]]  # dynamic batches with a limit of tokens
TABLES = ("embedding.word_embeddings.weight", "output_layer.weight")

Batch = dict[str, Any]


def batches(lengths: list[list[int]]) -> list[Batch]:
    """Return a batch for each list of lengths: one row of tokens, and the ends of its sequences."""
    generator = torch.Generator().manual_seed(2)
    made = []
    for of_one in lengths:
        shape = (1, sum(of_one))
        made.append(
            {
                "tokens": torch.randint(VOCABULARY, shape, generator=generator),
                "labels": torch.randint(VOCABULARY, shape, generator=generator),
                "loss_mask": torch.rand(shape, generator=generator).round(),
                "position_ids": torch.cat([*map(torch.arange, of_one)]).unsqueeze(0),
                "packed": packed_params(of_one),
            }
        )
    return made


def forward_step(data: Iterator[Batch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
    batch = next(data)
    output = model(
        input_ids=batch["tokens"],
        position_ids=batch["position_ids"],
        attention_mask=None,
        labels=batch["labels"],
        packed_seq_params=batch["packed"],
    )
    return output, partial(sum_of_losses, batch["loss_mask"])


def sum_of_losses(mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Return the sum of losses, the number of tokens that count, and the reported loss."""
    loss = (output * mask).sum()
    return loss, mask.sum().int(), {"loss": loss.item()}


def chunks_of(depths: int | None, varies: bool) -> list[torch.nn.Module]:
    config = small_config(
        LAYERS,
        RANKS,
        mtp_num_layers=depths,
        calculate_per_token_loss=True,
        variable_seq_lengths=varies,
        moe_token_dispatcher_type="alltoall",
    )
    spec = get_gpt_layer_local_spec()
    chunks: list[torch.nn.Module] = []
    for number in range(config.virtual_pipeline_model_parallel_size or 1):
        prediction = None
        if depths:
            prediction = get_gpt_mtp_block_spec(config, spec, False, vp_stage=number)
        chunk = GPTModel(
            config,
            spec,
            vocab_size=VOCABULARY,
            max_sequence_length=LONGEST,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            mtp_block_spec=prediction,
            vp_stage=number,
            **first_and_last(number),
        )
        draw_by_name(named_parameters(chunk))
        for name, part in named_parameters(chunk):
            if is_divided(name, part):
                whole = torch.nn.Parameter(torch.empty(VOCABULARY, part.shape[1]))
                draw_by_name(iter([(name, whole)]))
                part.data.copy_(whole.chunk(RANKS)[dist.get_rank()])
        chunks.append(chunk)
    return chunks


def is_divided(name: str, parameter: Tensor) -> bool:
    return name in TABLES and len(parameter) < VOCABULARY


def names(chunk: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters; the name of a part of a split table ends with its rank."""
    for name, parameter in named_parameters(chunk):
        yield f"{name} {dist.get_rank()}" if is_divided(name, parameter) else name, parameter


def step(
    lengths: list[list[int]], depths: int | None = None, replicas: int = 1
) -> tuple[list[Any], Gradients]:
    """Run one step on batches of sequences of ``lengths``, which ``replicas`` deal among them, and
    return losses and gradients."""
    rows = set(map(sum, lengths))

    def data() -> list[Any]:
        made = batches(lengths)
        return made if replicas == 1 else [made[number::replicas] for number in range(replicas)]

    return whole_step(
        partial(chunks_of, depths, len(rows) > 1),
        names,
        forward_step,
        data,
        replicas=replicas,
        seq_length=rows.pop() if len(rows) == 1 else 1,  # verl passes 1 if lengths vary
        micro_batch_size=1,
    )


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param(
            LENGTHS,
            marks=pytest.mark.covers(
                "B", ("line", "loop", "v"), enable_offline_packing=True, **PER_TOKEN, **PREDICTING
            ),
        ),
        pytest.param(
            VARYING,
            marks=pytest.mark.covers(
                "B",
                ("line", "loop", "v"),
                enable_in_batch_packing=True,
                variable_seq_lengths=True,
                **PER_TOKEN,
                **PREDICTING,
            ),
        ),
    ],
    ids=["one length", "lengths vary"],
)
def test_losses_and_gradients_of_a_callers_model(lengths: list[list[int]]) -> None:
    """A caller's model on packed sequences, with multi-token prediction, gets stock's losses and
    gradients. Batches are packed to one length, as in Megatron-Bridge, or to as many sequences as
    fit, as in verl and NeMo-RL."""

    def on_rank(rank: int) -> None:
        with apply(cpu.patches()):
            expected = step(lengths, 1)
            for schedule in ("zb-h1", "interleaved-zb", "zb-v"):
                with megatron_ext.install(schedule=schedule):
                    assert_same(step(lengths, 1), expected)

    values(run_ranks(RANKS, on_rank))


@pytest.mark.parametrize(
    ("schedule", "variant"),
    [
        pytest.param(
            *names,
            marks=pytest.mark.covers(
                "B", (KINDS[names[0]],), enable_offline_packing=True, **PER_TOKEN
            ),
        )
        for names in (("zb-v", "2"), *at_night(("zb-h1", "1"), ("zb-v", "1"), ("v-half", "2")))
    ],
)
def test_a_callers_model_with_the_vocabulary_divided(schedule: str, variant: str) -> None:
    """A caller's packed model trains with a vocabulary split over the ranks, which used to be
    refused. Sums over the parts have another order, so losses are close to stock's and not bitwise
    equal."""

    def on_rank(rank: int) -> None:
        with apply(cpu.patches()):
            expected_losses, expected = step(LENGTHS)
            with megatron_ext.install(schedule=schedule, vocab_parallel=variant):
                ours_losses, ours = step(LENGTHS)
        for table in TABLES:
            ours[table] = torch.cat([ours.pop(f"{table} {rank}") for rank in range(RANKS)])
        loss_of = operator.itemgetter("loss")
        assert [*map(loss_of, ours_losses)] == pytest.approx(
            [*map(loss_of, expected_losses)], rel=2**-21
        )
        assert ours.keys() == expected.keys()
        for name, gradient in ours.items():
            largest = expected[name].abs().max()
            assert (gradient - expected[name]).abs().max() <= 2**-19 * largest, name

    values(run_ranks(RANKS, on_rank))
