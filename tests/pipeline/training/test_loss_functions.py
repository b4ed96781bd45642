"""Tests that callers' loss functions receive what stock gives them, and may return what stock
accepts.

With a vocabulary split over the ranks, a loss function used to get a transposed tensor. Megatron's
own pretrain_gpt.py, which flattens that tensor by view(), died in its first step with a micro batch
of 2. In an evaluation, the step used to read `requires_grad` of a loss function's result, which a
number does not have; Megatron's own tests return numbers. The steps here run on two ranks, for
every feature that takes part in computing the loss.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module

import megatron_ext
from megatron_ext.patches import cpu
from megatron_ext.patches.engine import apply
from tests.helpers.callers import (
    Chunks,
    draw_by_name,
    first_and_last,
    named_parameters,
    small_config,
)
from tests.helpers.combinations import at_night
from tests.helpers.ranks import run_ranks, values

# There are eight layers, as a wave placement has eight stages.
LAYERS, SEQUENCE, BATCH, VOCABULARY, MICROBATCHES = 8, 8, 2, 32, 4

TABLES = ("embedding.word_embeddings.weight", "output_layer.weight")

FEATURES: dict[str, dict[str, Any]] = {
    "line": {"schedule": "zb-h1"},
    "loop": {"schedule": "interleaved-zb"},
    "V": {"schedule": "zb-v"},
    "wave": {"schedule": "hanayo"},
    "batched messages": {"schedule": "zb-v", "p2p": "batched"},
    "slices": {"schedule": "zb-h1", "slices": 2},
    "recompute": {"schedule": "zb-v", "recompute": f"first:{MICROBATCHES}"},
    "offload": {"schedule": "zb-v", "activation_offload": "full"},
    "vocabulary 1": {"schedule": "zb-h1", "vocab_parallel": "1"},
    "vocabulary 2": {"schedule": "zb-v", "vocab_parallel": "2"},
}
DIVIDED = ("vocabulary 1", "vocabulary 2")  # features under which no rank has whole logits

# One feature for each code path that calls the loss function.
MAKING_LOSSES = ("line", "slices", "recompute", "vocabulary 1")

LossFunction = Callable[..., Any]


@contextlib.contextmanager
def installed(feature: str) -> Iterator[None]:
    """Install ``feature`` within the context; an error gets a note that names the feature."""
    gc.collect()  # free models that were built with stock's layers
    try:
        with megatron_ext.install(**FEATURES[feature]):
            yield
    except Exception as error:
        error.add_note(f"under {feature}")
        raise


def build(dtype: torch.dtype) -> Chunks:
    """Return this rank's chunks, for bf16 in the wrapper of Megatron's that computes in it."""
    ranks = parallel_state.get_pipeline_model_parallel_world_size()
    is_bf16 = dtype is torch.bfloat16
    config = small_config(LAYERS, ranks, bf16=is_bf16, pipeline_dtype=dtype)
    chunks: Chunks = []
    for number in range(config.virtual_pipeline_model_parallel_size or 1):
        chunk: Any = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            share_embeddings_and_output_weights=False,
            vp_stage=number,
            **first_and_last(number),
        )
        draw(chunk)
        chunks.append(Float16Module(config, chunk) if is_bf16 else chunk)
    return chunks


def draw(chunk: GPTModel) -> None:
    """Draw weights by their names. A split table gets this rank's rows of the whole table."""
    draw_by_name(named_parameters(chunk))
    for name, parameter in chunk.named_parameters():
        if name in TABLES and len(parameter) < VOCABULARY:
            whole = torch.nn.Parameter(torch.empty(VOCABULARY, parameter.shape[1]))
            draw_by_name(iter([(name, whole)]))
            parameter.data.copy_(whole.chunk(dist.get_world_size())[dist.get_rank()])


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    shape = BATCH, SEQUENCE
    return [torch.randint(VOCABULARY, shape, generator=generator) for _ in range(MICROBATCHES)]


@dataclass(frozen=True)
class Call:
    """Call of the pipeline schedule by a caller with its own loss function."""

    loss_function: LossFunction | None
    forward_only: bool = False
    has_labels: bool = True
    collect_non_loss_data: bool = False

    def forward_step(
        self, data: Iterator[torch.Tensor], model: Any
    ) -> tuple[Any, LossFunction | None]:
        tokens = next(data)
        positions = torch.arange(SEQUENCE).expand(BATCH, -1)
        mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool()
        labels = tokens.roll(-1, 1) if self.has_labels else None
        return model(tokens, positions, mask, labels=labels), self.loss_function

    def run(self, chunks: Chunks) -> list[Any]:
        """Run the step, and return its losses to all ranks of the pipeline."""
        with torch.set_grad_enabled(not self.forward_only):
            losses = schedules.get_forward_backward_func()(
                forward_step_func=self.forward_step,
                data_iterator=[iter(batches()) for _ in chunks],
                model=chunks,
                num_microbatches=MICROBATCHES,
                seq_length=SEQUENCE,
                micro_batch_size=BATCH,
                forward_only=self.forward_only,
                collect_non_loss_data=self.collect_non_loss_data,
            )
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, losses)
        gathered = [loss for of_rank in everyone for loss in of_rank]
        assert len(gathered) == MICROBATCHES
        return gathered


def results(calls: Mapping[str, Call], dtype: torch.dtype = torch.float32) -> dict[str, list[Any]]:
    """Run ``calls`` in one pipeline, and return the results of each by its name."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=dist.get_world_size())
    model_parallel_cuda_manual_seed(0)
    chunks = build(dtype)
    returned = {name: call.run(chunks) for name, call in calls.items()}
    parallel_state.destroy_model_parallel()
    return returned


def described(output: torch.Tensor) -> dict[str, Any]:
    """Return all properties of ``output`` that a loss function can rely on, except the values."""
    return {
        "type": type(output),
        "shape": tuple(output.shape),
        "stride": output.stride(),
        "contiguous": output.is_contiguous(),
        "dtype": output.dtype,
        "device": output.device,
        "requires_grad": output.requires_grad,
        "is_leaf": output.is_leaf,
    }


def describing(output: torch.Tensor, non_loss_data: bool = False) -> Any:
    flat = output.view(-1)  # Megatron's loss functions flatten their input by view()
    if non_loss_data:
        return described(output)
    return flat.float().mean(), described(output)


RECEIVING = {
    "training": Call(describing),
    "evaluation": Call(describing, forward_only=True),
    "non-loss data": Call(describing, forward_only=True, collect_non_loss_data=True),
    "logits": Call(describing, has_labels=False),
    "logits of an evaluation": Call(describing, has_labels=False, forward_only=True),
}
AGAINST_DIVIDED = {"non-loss data", "logits", "logits of an evaluation"}


@pytest.mark.parametrize("dtype", [torch.float32, *at_night(torch.bfloat16)], ids=str)
def test_loss_functions_receive_what_stock_gives_them(dtype: torch.dtype) -> None:
    def on_rank(rank: int) -> None:
        with apply(cpu.patches()):
            expected = results(RECEIVING, dtype)
            for feature in FEATURES if dtype is torch.float32 else MAKING_LOSSES:
                refused = AGAINST_DIVIDED if feature in DIVIDED else set()
                calls = {name: call for name, call in RECEIVING.items() if name not in refused}
                with installed(feature):
                    assert results(calls, dtype) == {name: expected[name] for name in calls}

    values(run_ranks(2, on_rank))


# Results of a loss function that Megatron accepts (forward_step_calc_loss): the loss and an object
# to log; or the loss, the number of tokens and an object to log. An evaluation accepts a single
# number, too.
TRAINED: dict[str, LossFunction] = {
    "dict": lambda losses: (losses.mean(), {"loss": losses.mean().item()}),
    "number": lambda losses: (losses.mean(), losses.mean().item()),
    "tuple": lambda losses: (losses.mean(), (losses.mean().item(), 1)),
    "none": lambda losses: (losses.mean(), None),
    "list": lambda losses: [losses.mean(), {"loss": [losses.mean().item()]}],
    "tokens": lambda losses: (losses.sum(), torch.tensor(5), {"loss": (losses.sum().item(), 5)}),
}
EVALUATED: dict[str, LossFunction | None] = {
    **TRAINED,
    "numbers": lambda losses: (losses.mean().item(), {"loss": 3}),
    "whole numbers": lambda losses: (3, 3),
    "number of tokens": lambda losses: (1.5, torch.tensor(5), (losses.sum().item(), 5)),
    "no loss function": None,
}


def assert_alike(ours: Any, stocks: Any, where: str) -> None:
    """Assert that two results have the same structure, and numbers that agree up to the order of
    sums."""
    assert type(ours) is type(stocks), where
    if isinstance(stocks, dict):
        assert ours.keys() == stocks.keys(), where
        for key, expected in stocks.items():
            assert_alike(ours[key], expected, f"{where}[{key!r}]")
    elif isinstance(stocks, list | tuple):
        assert len(ours) == len(stocks), where
        for own, expected in zip(ours, stocks, strict=True):
            assert_alike(own, expected, where)
    elif isinstance(stocks, torch.Tensor):
        torch.testing.assert_close(ours, stocks, rtol=1e-5, atol=1e-5)
    elif isinstance(stocks, float):
        assert ours == pytest.approx(stocks, rel=1e-5), where
    else:
        assert ours == stocks, where


def test_loss_functions_may_return_what_stock_takes() -> None:
    calls = {
        **{f"{name} in training": Call(function) for name, function in TRAINED.items()},
        **{f"{name}": Call(function, forward_only=True) for name, function in EVALUATED.items()},
    }

    def on_rank(rank: int) -> None:
        with apply(cpu.patches()):
            expected = results(calls)
            for feature in MAKING_LOSSES:
                with installed(feature):
                    assert_alike(results(calls), expected, "")

    values(run_ranks(2, on_rank))
