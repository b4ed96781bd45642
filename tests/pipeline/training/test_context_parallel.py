"""Tests of context parallelism under every placement: losses and weights are stock Megatron's, to
the last bit.

Two pipeline ranks and two context-parallel ranks run, more if another kind of parallelism is added.
Attention is a stand-in (`tests.helpers.context_parallel`). Compared is all that a schedule affects:
scales of losses, shapes, process groups, checkpoints, and messages within passes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.multi_token_prediction import roll_tensor

import megatron_ext
from megatron_ext.adapter.step.call import Call
from megatron_ext.adapter.step.connections import connect_token_shifts
from megatron_ext.features.offload.runtime import offload
from megatron_ext.patches import cpu
from megatron_ext.patches.engine import apply
from tests.helpers import context_parallel
from tests.helpers.adversary import MODES
from tests.helpers.callers import (
    Gradients,
    draw_by_name,
    first_and_last,
    named_parameters,
    small_config,
    whole_step,
)
from tests.helpers.callers import assert_same as assert_same_gradients
from tests.helpers.combinations import IS_NIGHT, nightly
from tests.helpers.drawn_models import drawn_by_name
from tests.helpers.megatron_runs import (
    Run,
    assert_same,
    evaluations,
    losses,
    model_flags,
    predictions,
    train,
)
from tests.helpers.packed import packed_on_the_cpu, packed_params
from tests.helpers.ranks import lasting_folder, run_ranks, values
from tests.pipeline.features import test_vocabulary_training as vocabulary
from tests.pipeline.features.test_post_validation_training import EVERY_THIRD, Setting, times_redone
from tests.pipeline.training.test_packed_sequences import CONVERSATIONS

Flags = dict[str, object]

SAVED_AT = 1
UNTIED: Flags = {"untie_embeddings_and_output_weights": True}
FULL: Flags = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
EXPERTS: Flags = {
    "expert_model_parallel_size": 2,
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_aux_loss_coeff": 1e-2,
    "moe_z_loss_coeff": 1e-3,
    "moe_token_dispatcher_type": "alltoall",
    "disable_bias_linear": True,
}
OPTIMIZER: Flags = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "dist_ckpt_optim_fully_reshardable": True,
}
PACKED: Flags = UNTIED | CONVERSATIONS | {"seq_length": 64, "max_position_embeddings": 64}
DEPTHS: Flags = UNTIED | {"mtp_num_layers": 2}
MODELS: dict[str, Flags] = {
    "tied": {},
    "untied, loss per token, bf16": UNTIED | {"calculate_per_token_loss": True, "bf16": True},
    "learned positions, full recompute": FULL | {"position_embedding_type": "learned_absolute"},
    "experts, EP 2": EXPERTS,
    "distributed optimizer, both overlaps": OPTIMIZER,
    "2 depths, bf16": DEPTHS | {"bf16": True},
    "2 depths, loss per token": DEPTHS | {"calculate_per_token_loss": True},
    "conversations, loss per token": PACKED | {"calculate_per_token_loss": True},
    "conversations, 1 depth, bf16": PACKED | {"mtp_num_layers": 1, "bf16": True},
}
LARGER: dict[str, Flags] = {  # models that run on eight ranks
    "TP 2, SP, 2 depths": DEPTHS | {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "DP 2, distributed optimizer, both overlaps": OPTIMIZER,
}
LARGER_CASES = [
    ("TP 2, SP, 2 depths", "zb-h1"),
    ("TP 2, SP, 2 depths", "zb-v"),
    # Four replicas run on a line only: gloo sums in an order that depends on the position in a
    # bucket, and on a V that position differs from stock's.
    ("DP 2, distributed optimizer, both overlaps", "zb-h1"),
]
KINDS = {
    "1f1b": "line",
    "zb-h1": "line",
    "interleaved": "loop",
    "interleaved-zb": "loop",
    "zb-v": "v",
    "v-half": "v",
    "hanayo": "v",
}


@pytest.fixture(autouse=True)
def ranks_divide_sequences(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    context_parallel.install(monkeypatch)
    with packed_on_the_cpu():
        yield


def covers(schedule: str, settings: Flags) -> pytest.MarkDecorator:
    return pytest.mark.covers("B", (KINDS[schedule],), context_parallel_size=2, **settings)


def flags(**more: object) -> list[str]:
    settings: Flags = {
        "pipeline_model_parallel_size": 2,
        "context_parallel_size": 2,
        "num_layers": 8,
        "position_embedding_type": "rope",
        "train_iters": SAVED_AT + 2,
        "eval_interval": SAVED_AT + 2,
        "eval_iters": 1,
    }
    return model_flags(**settings | more)


def ranks_of(model: str) -> int:
    return 8 if model in LARGER else 4


@functools.cache
def saved(model: str, schedule: str | None = None) -> tuple[list[Run], Path]:
    """Return a run from the start, and the folder with the checkpoint of its first iteration."""
    folder = lasting_folder()
    saving: Flags = {"save": folder, "save_interval": SAVED_AT, "pipeline_schedule": schedule}
    return train(ranks_of(model), flags(**(MODELS | LARGER)[model], **saving)), folder


def resumed(model: str, folder: Path, **ours: object) -> list[Run]:
    more: Flags = (MODELS | LARGER)[model] | {"load": folder, "ckpt_step": SAVED_AT}
    return train(ranks_of(model), flags(**more, **ours))


def assert_resumed(runs: list[Run], reference: list[Run]) -> None:
    assert len(losses(runs)) == len(losses(reference)) - SAVED_AT
    assert evaluations(runs)
    assert bool(predictions(runs)) == bool(predictions(reference))
    assert_same(runs, reference)


def test_a_rank_has_its_part_of_tokens_and_messages() -> None:
    def group(ranks: int) -> Any:
        return SimpleNamespace(size=lambda: ranks)

    call = Call(
        forward_step_func=lambda *unused: None,
        num_microbatches=1,
        forward_only=False,
        collect_non_loss_data=False,
        first_val_step=None,
        force_all_reduce=False,
        context_parallel_size=4,
        config=small_config(2, 2, hidden_size=4),
        models=[],
        iterators=[],
        seq_length=16,
        micro_batch_size=2,
        decoder_seq_length=None,
        pipeline=group(2),
        groups=SimpleNamespace(tp=group(1), cp=group(4)),
    )
    assert call.boundary().shape == (4, 2, 4)
    assert call.tokens_shape == (2, 4)


@pytest.mark.parametrize(
    ("model", "schedule"),
    [
        pytest.param(model, schedule, marks=covers(schedule, settings))
        for model, settings in MODELS.items()
        for schedule in KINDS
    ]
    + [
        pytest.param(model, schedule, marks=covers(schedule, LARGER[model]))
        for model, schedule in LARGER_CASES
    ],
)
@nightly("by day one model meets a V, of all placements the one whose ends move")
def test_it_is_stock_to_the_last_bit(model: str, schedule: str) -> None:
    reference, folder = saved(model)
    runs = resumed(model, folder, pipeline_schedule=schedule)
    assert {run.schedule for run in runs} == {"PipelineStep"}
    assert_resumed(runs, reference)


@nightly("what attention gives does not matter where two runs are compared")
def test_the_stand_in_for_attention_attends_to_all_of_a_sequence() -> None:
    """The stand-in for attention attends to the whole sequence: stock's losses on two
    context-parallel ranks equal those of unsplit sequences up to the order of sums."""
    divided, undivided = (
        train(2 * ranks, flags(context_parallel_size=ranks), model_provider=drawn_by_name)
        for ranks in (2, 1)
    )
    assert losses(divided) == pytest.approx(losses(undivided), rel=2.0**-18)


@nightly("checkpoints do not know of sequences: test_checkpoints.py")
@pytest.mark.parametrize("model", ["distributed optimizer, both overlaps", "2 depths, bf16"])
def test_what_a_v_has_saved_stock_trains_on(model: str) -> None:
    reference, folder = saved(model, "zb-v")
    assert_resumed(resumed(model, folder), reference)


@nightly("which activations leave is the schedule's affair, and not attention's")
@pytest.mark.parametrize(
    "schedule",
    [pytest.param(name, marks=covers(name, {})) for name in ("zb-h1", "interleaved", "zb-v")],
)
def test_activations_leave_for_the_host(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "SMALL", 0)
    reference, folder = saved("tied")
    ours: Flags = {"pipeline_schedule": schedule, "pipeline_activation_offload": "full"}
    assert_resumed(resumed("tied", folder, **ours), reference)


@nightly("steps are taken back among the ranks of a pipeline")
@pytest.mark.parametrize(
    ("schedule", "more"),
    [
        ("zb-v", {"calculate_per_token_loss": True, **OPTIMIZER}),
        ("zb-2p", {"fp16": True, "initial_loss_scale": 2.0**10, "loss_scale_window": 5}),
    ],
)
def test_steps_that_are_taken_back(schedule: str, more: Flags) -> None:
    sizes: Flags = {"pipeline_model_parallel_size": 2, "context_parallel_size": 2}
    runs, expected = Setting(4, schedule, sizes | UNTIED | more).both(EVERY_THIRD, train_iters=7)
    assert_same(runs, expected)
    assert times_redone(runs) == 2


@nightly("test_vocabulary_training.py has it with sequences, test_packed_sequences.py with packed")
@pytest.mark.parametrize(("schedule", "variant"), [("zb-h1", 1), ("zb-v", 2)])
def test_packed_with_the_vocabulary_divided(schedule: str, variant: int) -> None:
    sizes: Flags = {"context_parallel_size": 2, "calculate_per_token_loss": True}
    # Stock accepts one pack of sequences a microbatch.
    flags = PACKED | sizes | {"position_embedding_type": "rope", "micro_batch_size": 1}
    setting = vocabulary.training(4, 2, flags)
    reference, folder = setting.saved()
    ours: Flags = {"pipeline_schedule": schedule, "pipeline_vocab_parallel": variant}
    runs, _ = setting.saved(load=folder, ckpt_step=1, **ours)
    vocabulary.assert_close(runs, reference)


# --- sequences that a caller has packed, each padded to a divisible length, as Megatron-Bridge does

Batch = dict[str, Any]

LENGTHS = [[5, 4, 3], [12], [1, 8, 3], [6, 6], [2, 2, 7]]
PADDING = [[3, 0, 1], [4], [3, 0, 1], [2, 2], [2, 2, 1]]
TOKENS, VOCABULARY = 16, 32


def batches() -> list[Batch]:
    """Return this context-parallel rank's part of each batch: two pieces of every padded
    sequence."""
    generator = torch.Generator().manual_seed(2)
    group = parallel_state.get_context_parallel_group()
    made = []
    for lengths, padding in zip(LENGTHS, PADDING, strict=True):
        padded = [*map(sum, zip(lengths, padding, strict=True))]
        own = context_parallel.places(padded, group.rank(), group.size())
        is_real = [torch.arange(n) < real for n, real in zip(padded, lengths, strict=True)]
        whole = {
            "tokens": torch.randint(VOCABULARY, (TOKENS,), generator=generator),
            "labels": torch.randint(VOCABULARY, (TOKENS,), generator=generator),
            "loss_mask": torch.cat(is_real).float(),
            "position_ids": torch.cat([*map(torch.arange, padded)]),
        }
        parts = {name: tensor[own].unsqueeze(0) for name, tensor in whole.items()}
        packed = packed_params(lengths, padding)
        # rotary embeddings are computed for the longest padded sequence
        packed.max_seqlen_q = packed.max_seqlen_kv = max(padded)
        made.append(parts | {"packed": packed})
    return made


def forward_step(data: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    batch = next(data)
    output = model(
        input_ids=batch["tokens"],
        position_ids=batch["position_ids"],
        attention_mask=None,
        labels=batch["labels"],
        packed_seq_params=batch["packed"],
    )
    return output, partial(sum_of_losses, batch["loss_mask"])


def sum_of_losses(mask: torch.Tensor, output: torch.Tensor) -> tuple[Any, ...]:
    loss = (output * mask).sum()
    return loss, mask.sum().int(), {"loss": loss.item()}


def chunks() -> list[torch.nn.Module]:
    config = small_config(4, 2, context_parallel_size=2, calculate_per_token_loss=True)
    made: list[torch.nn.Module] = []
    for number in range(config.virtual_pipeline_model_parallel_size or 1):
        chunk = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=VOCABULARY,
            max_sequence_length=TOKENS,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            vp_stage=number,
            **first_and_last(number),
        )
        draw_by_name(named_parameters(chunk))
        made.append(chunk)
    return made


def names(chunk: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters, with the context-parallel rank in their names. Gradients are not summed
    over that group in this test, so each rank has its own."""
    rank = parallel_state.get_context_parallel_rank()
    for name, parameter in named_parameters(chunk):
        yield f"{name} of rank {rank}", parameter


def step() -> tuple[list[Any], Gradients]:
    return whole_step(
        chunks,
        names,
        forward_step,
        batches,
        context_parallel=2,
        seq_length=TOKENS,
        micro_batch_size=1,
    )


@pytest.mark.covers(
    "B",
    ("line", "loop", "v"),
    context_parallel_size=2,
    enable_offline_packing=True,
    calculate_per_token_loss=True,
)
def test_packed_sequences_of_a_caller() -> None:
    def on_rank(rank: int) -> None:
        with apply(cpu.patches()):
            stocks = step()
            for schedule in ("zb-h1", "interleaved-zb", "zb-v"):
                with megatron_ext.install(schedule=schedule):
                    assert_same_gradients(step(), stocks)

    values(run_ranks(4, on_rank))


# --- messages of multi-token prediction between context-parallel ranks, in the middle of passes

SMALL: Flags = UNTIED | {
    "mtp_num_layers": 1,
    "num_layers": 4,
    "global_batch_size": 4,
    "train_iters": 2,
    "eval_iters": 0,
}


@functools.cache
def small() -> list[Run]:
    return train(4, flags(**SMALL), model_provider=drawn_by_name)


STOPPED = [(name, mode) for name in ("zb-v", "zb-h1", "interleaved-zb") for mode in MODES]


@pytest.mark.parametrize(
    ("schedule", "mode"),
    [
        pytest.param(*case, marks=covers(case[0], {"mtp_num_layers": 1}))
        for case in (STOPPED if IS_NIGHT else STOPPED[:1])
    ],
)
def test_no_rank_waits_for_ever_where_passes_send(schedule: str, mode: str) -> None:
    """Passes of multi-token prediction send messages between context-parallel ranks, and no rank
    waits for ever. The simulated devices block before each pass or finish late
    (`tests.helpers.adversary`). With NCCL the first message between two ranks creates a
    communicator, which must not happen in the middle of a pass."""
    with MODES[mode]():
        ours = flags(**SMALL, pipeline_schedule=schedule)
        runs = train(4, ours, model_provider=drawn_by_name)
    assert {run.schedule for run in runs} == {"PipelineStep"}
    assert len(losses(runs)) == len(predictions(runs)) == 2
    assert_same(runs, small())


class Predicting(torch.nn.Module):
    """Stand-in for the chunk of a model with multi-token prediction."""

    mtp_process = True

    def __init__(self) -> None:
        super().__init__()
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList()


def test_ranks_that_shift_tokens_meet_before_the_first_step() -> None:
    """Ranks of a model with multi-token prediction connect to their neighbours in the
    context-parallel group before the first step. Ranks of a model without multi-token prediction
    connect to no rank."""

    def run(rank: int) -> tuple[set[int], ...]:
        met: set[int] = set()
        isend, group = dist.isend, dist.group.WORLD
        assert group is not None

        def noted(tensor: torch.Tensor, dst: int) -> Any:
            met.add(dst)
            return isend(tensor, dst)

        chunks = [torch.nn.Module(), Predicting()]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "isend", noted)
            patch.setattr(torch.cuda, "current_device", lambda: "cpu")
            connect_token_shifts(chunks[:1], group)
            before = met.copy()
            connect_token_shifts(chunks, group)
            at_first = met.copy()
            roll_tensor(torch.arange(8).view(1, 8), cp_group=group)
        return before, at_first, met

    for rank, (before, at_first, met) in enumerate(values(run_ranks(3, run))):
        assert not before
        assert at_first == met == {rank - 1, rank + 1} & {0, 1, 2}
