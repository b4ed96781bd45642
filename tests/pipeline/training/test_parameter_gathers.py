"""Tests of parameter gathers that the schedule starts, set up as Megatron-Bridge does with virtual
stages."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed import finalize_model_grads as finalize
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

import megatron_ext
from megatron_ext.patches import cpu
from megatron_ext.patches.engine import apply
from tests.helpers.callers import draw_by_name, first_and_last, forward_step, small_config
from tests.helpers.coalesced_gathers import forbid_coalesced_gathers
from tests.helpers.ranks import run_ranks, values

RANKS, STAGES, CHUNKS = 4, 2, 3  # two pipeline ranks and two replicas
SEQUENCE, BATCH, VOCABULARY, MICROBATCHES, STEPS = 8, 1, 32, 4, 2

# What happens to a chunk, with its number: "gather" (started by the schedule), "late" (a gather
# that a hook starts) or "F".
Event = tuple[str, int]


def build_chunks(*, sets_no_sync: bool) -> list[DistributedDataParallel]:
    config = small_config(
        STAGES * CHUNKS,
        STAGES,
        virtual_pipeline_model_parallel_size=CHUNKS,
        overlap_p2p_comm=True,  # without overlap, stock mixes up the messages of two ranks
        batch_p2p_comm=False,
        finalize_model_grads_func=finalize,
    )
    overlapped = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        align_param_gather=True,
        bucket_size=500,  # small, so that each chunk has several buckets
    )
    chunks = []
    for number in range(CHUNKS):
        chunk = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            share_embeddings_and_output_weights=False,
            vp_stage=number,
            **first_and_last(number),
        )
        draw_by_name(chunk.named_parameters())
        chunks.append(DistributedDataParallel(config, overlapped, chunk))
    if sets_no_sync:
        config.no_sync_func = [chunk.no_sync for chunk in chunks]
    config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks]
    return chunks


@contextlib.contextmanager
def noting(chunks: list[DistributedDataParallel]) -> Iterator[list[Event]]:
    """Yield a list of events: a gather starts by the schedule, a gather starts too late by a hook,
    a forward pass begins."""
    events: list[Event] = []
    start: Callable[..., None] = _ParamAndGradBucketGroup.start_param_sync
    finish: Callable[..., None] = _ParamAndGradBucketGroup.finish_param_sync
    of_group = {id(group): n for n, chunk in enumerate(chunks) for group in chunk.bucket_groups}

    def noted_start(group: Any, *args: Any, **kwargs: Any) -> None:
        events.append(("gather", of_group[id(group)]))
        start(group, *args, **kwargs)

    def noted_finish(group: Any, *args: Any, **kwargs: Any) -> None:
        if not group.param_gather_dispatched:
            events.append(("late", of_group[id(group)]))
        finish(group, *args, **kwargs)

    def noted_pass(number: int, *_: Any) -> None:
        events.append(("F", number))

    hooks = [
        chunk.module.register_forward_pre_hook(partial(noted_pass, number))
        for number, chunk in enumerate(chunks)
    ]
    _ParamAndGradBucketGroup.start_param_sync = noted_start
    _ParamAndGradBucketGroup.finish_param_sync = noted_finish
    yield events
    _ParamAndGradBucketGroup.start_param_sync = start
    _ParamAndGradBucketGroup.finish_param_sync = finish
    for hook in hooks:
        hook.remove()


def train(*, sets_no_sync: bool = True) -> tuple[list[Any], list[str], list[Event]]:
    """Train, and return this rank's losses, digests of its parameters, and the events of the last
    step."""
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=STAGES, virtual_pipeline_model_parallel_size=CHUNKS
    )
    model_parallel_cuda_manual_seed(0)
    chunks = build_chunks(sets_no_sync=sets_no_sync)
    config = chunks[0].config
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=1e-2, clip_grad=0, use_distributed_optimizer=True), chunks
    )
    run = partial(
        get_forward_backward_func(),
        forward_step_func=forward_step,
        model=chunks,
        num_microbatches=MICROBATCHES,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
    )
    losses = []
    for step in range(STEPS):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        with noting(chunks) as events:
            losses += run(data_iterator=[batches(step) for _ in chunks])
        optimizer.step()
        # Megatron-Bridge sets param_sync_func after the first trained step.
        config.param_sync_func = [chunk.start_param_sync for chunk in chunks]
    for chunk in chunks:
        chunk.start_param_sync(force_sync=True)
    digests = [
        hashlib.sha256(parameter.detach().numpy().tobytes()).hexdigest()
        for chunk in chunks
        for parameter in chunk.parameters()
    ]
    with noting(chunks) as of_evaluation:
        losses += run(data_iterator=[batches(9) for _ in chunks], forward_only=True)
    assert not [kind for kind, _ in of_evaluation if kind == "gather"]
    parallel_state.destroy_model_parallel()
    return losses, digests, events


def batches(seed: int) -> Iterator[torch.Tensor]:
    seed = seed * 10 + parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(MICROBATCHES):
        yield torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator)


def test_gathers_start_ahead_of_the_passes_and_change_no_bit() -> None:
    """The schedule starts parameter gathers ahead of the passes that need them, with the same
    numbers. Under our schedules no code used to call param_sync_func, so every gather began only
    when a pass waited for it."""

    def with_stock_and_ours(rank: int) -> None:
        forbid_coalesced_gathers()
        with apply(cpu.patches()):
            losses, digests, of_stock = train()
            with megatron_ext.install(schedule=f"interleaved-zb:vpp={CHUNKS}"):
                ours = train()
        assert ours[:2] == (losses, digests) and len(digests) > 6
        for events in (of_stock, ours[2]):
            assert not [kind for kind, _ in events if kind == "late"]
            first = {event: events.index(event) for event in events}
            assert first["gather", 1] < first["F", 0]
            assert first["gather", 2] < first["F", 1]

    values(run_ranks(RANKS, with_stock_and_ours))


def test_a_caller_need_not_hold_back_reductions() -> None:
    """A caller may omit no_sync_func under our schedules too. Stock's hooks then count the
    gradients of all microbatches, but W computes gradients without a hook. The count of the first
    step used to be incomplete, and zero_grad_buffer of the second step failed."""

    def with_and_without(rank: int) -> None:
        with (
            apply(cpu.patches()),
            megatron_ext.install(schedule=f"interleaved-zb:vpp={CHUNKS}"),
        ):
            losses, digests, _ = train()
            assert train(sets_no_sync=False)[:2] == (losses, digests)

    values(run_ranks(RANKS, with_and_without))
