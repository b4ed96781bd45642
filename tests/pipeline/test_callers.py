"""Code that calls Megatron's schedule itself, as Megatron-Bridge, verl and NeMo do.

They bring their own model, their own p2p_communicator and pg_collection, and a loss of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

import megatron_ext
from megatron_ext.patches import cpu
from megatron_ext.patches.engine import apply
from tests.ranks import run_ranks, values

RANKS = 4
SEQUENCE, BATCH, VOCABULARY, MICROBATCHES = 8, 2, 32, 6


def build_model() -> GPTModel:
    config = TransformerConfig(
        num_layers=RANKS,
        hidden_size=16,
        num_attention_heads=2,
        pipeline_model_parallel_size=RANKS,
        pipeline_dtype=torch.float32,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        transformer_impl="local",
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    )


def loss_function(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    loss = output.mean()
    return loss, {"loss": loss.item()}


def forward_step(data: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    tokens = next(data)
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool()
    return model(tokens, positions, mask, labels=tokens), partial(loss_function)


def step(own_groups: bool, forward_only: bool = False) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """One step; losses and gradients of this rank."""
    torch.manual_seed(1)
    model = build_model()
    generator = torch.Generator().manual_seed(2)
    data = iter(
        torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator)
        for _ in range(MICROBATCHES)
    )
    groups: dict[str, Any] = {}
    if own_groups:
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        groups["p2p_communicator"] = P2PCommunicator(pipeline, model.config)
        groups["pg_collection"] = schedules._build_default_pg_collection()
    run = schedules.get_forward_backward_func()
    losses = run(
        forward_step_func=forward_step,
        data_iterator=data,
        model=[model],
        num_microbatches=MICROBATCHES,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=forward_only,
        **groups,
    )
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def on_rank(rank: int, schedule: str, own_groups: bool) -> None:
    with apply(cpu.patches()):
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=RANKS)
        model_parallel_cuda_manual_seed(0)
        expected_losses, expected = step(own_groups)
        expected_evaluation, _ = step(own_groups, forward_only=True)
        with megatron_ext.install(schedule=schedule):
            losses, gradients = step(own_groups)
            evaluation, none = step(own_groups, forward_only=True)
        assert losses == expected_losses and len(losses) == (MICROBATCHES if rank == 3 else 0)
        assert evaluation == expected_evaluation and not none
        assert gradients.keys() == expected.keys() and gradients
        for name, gradient in gradients.items():
            assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("own_groups", [False, True])
def test_gradients_and_losses_are_stocks(schedule: str, own_groups: bool) -> None:
    values(run_ranks(RANKS, lambda rank: on_rank(rank, schedule, own_groups)))


def test_a_rank_with_another_program_is_found_before_the_first_pass() -> None:
    """Each rank reads its own copy of a schedule file; one of them is stale."""

    def differing(rank: int) -> str:
        with apply(cpu.patches()), contextlib.ExitStack() as stack:
            parallel_state.initialize_model_parallel(pipeline_model_parallel_size=RANKS)
            model_parallel_cuda_manual_seed(0)
            stack.enter_context(megatron_ext.install(schedule="gpipe" if rank == 2 else "1f1b"))
            with pytest.raises(RuntimeError, match="built different programs") as caught:
                step(own_groups=False)
            return str(caught.value)

    assert len(values(run_ranks(RANKS, differing))) == RANKS
