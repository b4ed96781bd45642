"""Megatron's own schedule functions in the benchmark on emulated clocks.

They run unchanged, with a chunk that sleeps in place of a model, so that only the waiting differs
from ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_ext.compile.registry import choose
from scripts.benchmarks.contestants import ideal_of, program_of
from scripts.benchmarks.emulated import DTYPE, SHAPE, Contender, EmulatedChunk, data


class _Chunk(torch.nn.Module):
    """An emulated chunk with the attributes and methods that Megatron's schedules use."""

    def __init__(self, chunk: EmulatedChunk, config: TransformerConfig, vp_stage: int) -> None:
        super().__init__()
        self.chunk = chunk
        self.config = config
        self.vp_stage = vp_stage
        self.model_type = ModelType.encoder_or_decoder
        self.input: Tensor | None = None

    def set_input_tensor(self, tensors: Any) -> None:
        self.input = tensors[0] if isinstance(tensors, list) else tensors

    def forward(self) -> Tensor:
        return self.chunk(data() if self.input is None else self.input)


def _forward_step(data_iterator: Any, model: _Chunk) -> tuple[Tensor, Any]:
    def loss(output: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return output.mean(), {}

    return model(), loss


def contenders(ranks: int, microbatches: int, costs: str) -> Iterator[Contender]:
    """Yield Megatron's 1F1B and, if it accepts these sizes, its interleaved schedule."""
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks)
    yield _contender("1f1b", ranks, microbatches, costs, chunks=1)
    if microbatches % ranks == 0:
        yield _contender("interleaved", ranks, microbatches, costs, chunks=2)


def _contender(name: str, ranks: int, microbatches: int, costs: str, chunks: int) -> Contender:
    program = program_of(choose(name), ranks, microbatches, costs)
    config = TransformerConfig(
        num_layers=ranks * chunks,
        hidden_size=SHAPE[2],
        num_attention_heads=1,
        pipeline_model_parallel_size=ranks,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_dtype=DTYPE,
        overlap_p2p_comm=chunks > 1,
        batch_p2p_comm=chunks == 1,
        deallocate_pipeline_outputs=True,
    )
    rank = parallel_state.get_pipeline_model_parallel_rank()
    models = [
        _Chunk(EmulatedChunk(stage, program.problem.costs), config, vp_stage)
        for vp_stage, stage in enumerate(program.schedule.placement.stages_of[rank])
    ]
    run = (
        schedules.forward_backward_pipelining_with_interleaving
        if chunks > 1
        else schedules.forward_backward_pipelining_without_interleaving
    )

    def step() -> None:
        run(
            forward_step_func=_forward_step,
            data_iterator=[None] * chunks if chunks > 1 else None,
            model=models if chunks > 1 else models[0],
            num_microbatches=microbatches,
            seq_length=SHAPE[0],
            micro_batch_size=SHAPE[1],
        )

    passes = 2 * microbatches * chunks
    return Contender(f"megatron {name}", ideal_of(program), passes, step)
