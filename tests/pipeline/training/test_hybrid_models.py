"""Tests of hybrid models and of linear attention under every placement, compared with stock
Megatron.

The pattern of a hybrid model says which layers each stage has, so our schedules must pick the right
part of the pattern for each stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec as block_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.training import get_args
from megatron.training.argument_utils import core_transformer_config_from_args

import megatron_ext
from megatron_ext.compile.registry import choose
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
from tests.helpers.combinations import at_night
from tests.helpers.covers.marks import covers
from tests.helpers.documents import check_written, table
from tests.helpers.hybrid import DELTA_NET, hybrid_model, stub_kernels
from tests.helpers.megatron_runs import Run, losses, model_flags, train
from tests.helpers.megatron_runs import assert_same as assert_runs_are_same
from tests.helpers.ranks import run_ranks, values

UNTIED = {"untie_embeddings_and_output_weights": True}
RANKS, SEQUENCE, BATCH, VOCABULARY, MICROBATCHES = 2, 8, 2, 32, 6
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_token_dispatcher_type": "alltoall",
    "moe_aux_loss_coeff": 1e-2,
    "add_bias_linear": False,
}


def config(layers: int, chunks: int | None, **settings: Any) -> TransformerConfig:
    return small_config(layers, RANKS, virtual_pipeline_model_parallel_size=chunks, **settings)


# Function that makes a chunk, given the number of chunks of a rank and the chunk's number.
Make = Callable[[int | None, int], Any]


def hybrid(
    segments: Sequence[str],
    settings: dict[str, Any],
    chunks: int | None,
    number: int,
    end: str = "",
) -> Any:
    """Return chunk ``number`` of a hybrid model with ``segments``, joined so that there is one
    segment for each stage."""
    stages = RANKS * (chunks or 1)
    own = len(segments) // stages
    main = "|".join("".join(segments[s * own : (s + 1) * own]) for s in range(stages))
    return hybrid_model(
        config(len("".join(segments)), chunks, is_hybrid_model=True, **settings),
        main + end,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        vp_stage=number if chunks else None,
        **first_and_last(number),
    )


def step(make: Make, chunks: int | None) -> tuple[list[Any], Gradients]:
    def build() -> list[torch.nn.Module]:
        made = [make(chunks, number) for number in range(chunks or 1)]
        for chunk in made:
            draw_by_name(named_parameters(chunk))
        return made

    return whole_step(
        build,
        named_parameters,
        forward_step,
        tokens,
        chunks=chunks,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
    )


def forward_step(data: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    batch = next(data)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool()
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    return model(batch, positions, mask, labels=batch, loss_mask=torch.ones(batch.shape)), mean


def mean(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    loss = output.float().mean()
    return loss, {"loss": loss.item()}


def tokens() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [
        torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator)
        for _ in range(MICROBATCHES)
    ]


def linear(settings: dict[str, Any], chunks: int | None, number: int) -> Any:
    """Return chunk ``number`` of a GPTModel in which every second layer has linear attention."""
    stub_kernels()
    of_model = config(
        8,
        chunks,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=2,
        **DELTA_NET,
        **settings,
    )
    return GPTModel(
        of_model,
        block_spec(of_model, vp_stage=number if chunks else None),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        vp_stage=number if chunks else None,
        **first_and_last(number),
    )


SEGMENTS = ["*-", "", "E", "*", "E*", "-", "", "-"]
OF_DELTA_NETS = ["*", "G", "-", "", "G*", "", "-", "-"]
MODELS: dict[str, Make] = {
    "HybridModel, `*-E`": partial(hybrid, SEGMENTS, EXPERTS),
    "HybridModel, `*-E`, two depths of multi-token prediction": partial(
        hybrid, SEGMENTS, {**EXPERTS, "mtp_num_layers": 2}, end="/*-/*-"
    ),
    "HybridModel, `*-G`": partial(hybrid, OF_DELTA_NETS, DELTA_NET),
    "GPTModel, linear attention": partial(linear, {}),
    "GPTModel, linear attention, experts": partial(linear, EXPERTS),
}
BY_DAY = {
    "HybridModel, `*-E`": ("zb-h1", "interleaved-zb", "zb-v"),
    "HybridModel, `*-G`": ("zb-v",),
    "GPTModel, linear attention": ("zb-h1", "interleaved-zb", "zb-v"),
}
ALL = ("1f1b", "zb-h1", "interleaved", "interleaved-zb", "zb-v", "v-half", "hanayo")
CASES = [*BY_DAY.items(), *at_night(*((model, ALL) for model in MODELS))]


LINEAR: dict[str, Any] = {"experimental_attention_variant": "gated_delta_net"}
SHOWN: dict[str, dict[str, Any]] = {
    "HybridModel, `*-E`": {"hybrid_layer_pattern": "*-E", **EXPERTS},
    "HybridModel, `*-E`, two depths of multi-token prediction": {
        "hybrid_layer_pattern": "*-E/*-/*-",
        "mtp_num_layers": 2,
        **EXPERTS,
    },
    "HybridModel, `*-G`": {"hybrid_layer_pattern": "*-G"},
    "GPTModel, linear attention": LINEAR,
    "GPTModel, linear attention, experts": {**LINEAR, **EXPERTS},
}


def case(model: str, schedules: tuple[str, ...]) -> Any:
    """Return a test case with its mark. Attention is Megatron's own except for the delta rule's
    kernel."""
    grade = "A" if "-E" in model else "B"
    return pytest.param(model, schedules, marks=covers(grade, schedules, UNTIED | SHOWN[model]))


@pytest.mark.parametrize(("model", "schedules"), [case(*names) for names in CASES])
def test_steps_are_stocks(model: str, schedules: tuple[str, ...]) -> None:
    """Losses and gradients of hybrid models are stock's. A hybrid model under a V schedule used to
    train with the stages of a loop (interleaved) placement, without an error: its first stage ran
    the third part of the pattern."""
    make = MODELS[model]

    def on_rank(rank: int) -> None:
        with apply(cpu.patches()):
            expected = step(make, None)
            for schedule in schedules:
                chunks = choose(schedule).example.chunks
                with megatron_ext.install(schedule=schedule):
                    assert_same(step(make, chunks if chunks > 1 else None), expected)

    values(run_ranks(RANKS, on_rank))


def of_pattern(pattern: str, chunks: int | None, number: int) -> Any:
    return hybrid_model(
        config(6, chunks, is_hybrid_model=True),
        pattern,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        vp_stage=number if chunks else None,
        **first_and_last(number),
    )


def test_a_pattern_has_as_many_segments_as_there_are_stages() -> None:
    """A hybrid model is refused if its pattern has fewer or more segments than the schedule has
    stages. Given more segments, stock builds the first ones only and trains a smaller model."""

    def on_rank(rank: int) -> None:
        with apply(cpu.patches()):
            for schedule, pattern, chunks, told in (
                ("zb-h1", "*-|*-|*-|*-", None, "has 4 pipeline segments, .* zb-h1 has 2 stages"),
                ("zb-v", "*-*|-*-", 2, "has 2 pipeline segments, .* zb-v has 4 stages on 2"),
                ("zb-v", "*-*-*-", 2, "1 pipeline segment, .* '\\*-\\|\\*-\\|\\*\\|-'"),
                ("interleaved-zb", "*-*|-*-", 2, "has 2 pipeline segments, .* has 4 stages"),
                ("zb-v", "*-|*-|*-|*-", None, "is built without vp_stage: build one"),
            ):
                with (
                    megatron_ext.install(schedule=schedule),
                    pytest.raises(ValueError, match=told),
                ):
                    step(partial(of_pattern, pattern), chunks)
                parallel_state.destroy_model_parallel()

    values(run_ranks(RANKS, on_rank))


# --- trainings through the launcher


def provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: TransformerConfig | None = None,
    pg_collection: Any = None,
) -> Any:
    args = get_args()
    return hybrid_model(
        config or core_transformer_config_from_args(args),
        args.hybrid_layer_pattern,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )


def trained(pattern: str, **flags: object) -> list[Run]:
    words = model_flags(
        num_layers=None,
        hybrid_layer_pattern=pattern,
        pipeline_model_parallel_size=RANKS,
        num_experts=4,
        moe_router_topk=2,
        moe_ffn_hidden_size=32,
        disable_bias_linear=True,
        **DELTA_NET,
        train_iters=3,
        lr_decay_iters=100,
        save_interval=1,
        **flags,
    )
    return train(RANKS, words, model_provider=provider)


@pytest.mark.parametrize(
    ("schedule", "stocks", "ours"),
    [
        ("zb-v", "*E*-|*E*-", "*E*-*E*-"),
        *at_night(("zb-h1", "*E*-|*E*-", "*E|*-*E*-"), ("zb-v", "G*E-|*GE*", "G|*E-|*G|E*")),
    ],
)
def test_checkpoints_go_from_stock_to_ours_and_back(
    schedule: str, stocks: str, ours: str, tmp_path: Path
) -> None:
    """Checkpoints of hybrid models go from stock to our schedules and back. A pattern without
    segments is split evenly."""
    whole = trained(stocks, save=tmp_path / "stock")
    between = trained(
        ours,
        pipeline_schedule=schedule,
        load=tmp_path / "stock",
        ckpt_step=1,
        save=tmp_path / "ours",
        exit_interval=2,
    )
    assert losses(between) == losses(whole)[1:2]
    back = trained(stocks, load=tmp_path / "ours")
    assert len(losses(back)) == 1
    assert_runs_are_same(back, whole)


def test_the_table_of_hybrid_models() -> None:
    launched = {"HybridModel, `*-E`": "zb-h1, zb-v", "HybridModel, `*-G`": "zb-v, with `E`"}
    rows = [
        [model, *map(under, ("line", "loop", "v wave")), launched.get(model, "-")]
        for model in MODELS
    ]
    head = ["model", "lines", "loops", "V's, waves", "stock's checkpoint to ours and back"]
    check_written("hybrid models", table(head, rows))


def under(placements: str) -> str:
    return ", ".join(name for name in ALL if choose(name).example.name in placements.split())
