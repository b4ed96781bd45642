"""Tests of a GPTModel that runs slice by slice, called with whole batches.

Losses and gradients are those of whole sequences, and stored bytes do not grow with the number of
slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="needs megatron-core")

from megatron.core import parallel_state, utils
from megatron.core.models import backends
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexerLossLoggingHelper,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_logging import (
    destroy_moe_metrics_tracker,
    get_moe_metrics_tracker,
)
from torch import Tensor

from megatron_ext.adapter.compatibility import refuse_order
from megatron_ext.adapter.slices.context_parallel import cut_by_slices
from megatron_ext.adapter.slices.known_models import refuse_unknown
from megatron_ext.adapter.slices.model_call import cut_to_slice
from megatron_ext.adapter.slices.slice_attention import attend_with_transformer_engine
from megatron_ext.adapter.step.loss import loss_with_gradient
from megatron_ext.adapter.step.model_stage import StepCall
from megatron_ext.compile.build import build_program
from megatron_ext.compile.registry import choose
from megatron_ext.config import PipelineConfig
from megatron_ext.patches import cpu
from megatron_ext.patches.engine import apply
from megatron_ext.patches.megatron.core.models.common.embeddings.rotary_pos_embedding import (
    slices as rotary_slices,
)
from megatron_ext.patches.megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    slices as yarn_slices,
)
from megatron_ext.patches.megatron.core.models.gpt.gpt_model import slices as gpt_model_slices
from megatron_ext.patches.megatron.core.transformer import dot_product_attention
from megatron_ext.patches.megatron.core.transformer.experimental_attention_variant import dsa
from megatron_ext.patches.megatron.core.transformer.moe import router
from megatron_ext.patches.megatron.core.transformer.multi_token_prediction import (
    slices as multi_token_slices,
)
from megatron_ext.patches.megatron.core.utils import batches_by_slices
from megatron_ext.runtime.slices.running_slice import Span, running_slice, spans
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.placement import line
from megatron_ext.schedule.problem import Problem, ScheduleOptions
from megatron_ext.schedule.slices import Slices
from tests.helpers import context_parallel
from tests.helpers.accepting import accepts
from tests.helpers.callers import small_config
from tests.helpers.combinations import at_night, nightly
from tests.helpers.latent_attention import Attention
from tests.helpers.ranks import run_ranks, values
from tests.helpers.sparse_attention import SPARSE, sparse_layers

SEQUENCE, BATCH, VOCABULARY = 16, 2, 32
EVEN, UNEVEN = (4, 4, 4, 4), (7, 5, 3, 1)


@dataclass(frozen=True)
class Case:
    """Model, and the arguments with which it is called."""

    settings: dict[str, Any] = field(default_factory=dict)
    positions: str = "rope"
    has_mask: bool = False
    config: type[TransformerConfig] = TransformerConfig


LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "kv_channels": 8,
}
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
REPEATED = {"mtp_num_layers": 2, "mtp_use_repeated_layer": True}
# Routers with losses; a router's loss over one slice differs from that over the sequence. The
# weights of the losses are large enough to change gradients.
ROUTED = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 16,
    "moe_aux_loss_coeff": 0.5,
    "moe_z_loss_coeff": 0.1,
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
}
SETTINGS_OF_SPARSE: dict[str, dict[str, Any]] = {
    "yarn": {"rope_type": "yarn"},
    "loss of the chosen": {"dsa_indexer_use_sparse_loss": True},
    "loss per token": {"calculate_per_token_loss": True},
    "no loss": {"dsa_indexer_loss_coeff": 0.0},
    "full recompute": FULL,
    "selective recompute": {"recompute_granularity": "selective"},
}
SPARSELY = {
    f"sparse attention, {name}": Case(
        SPARSE | LATENT | {"rope_type": "rope"} | settings, config=MLATransformerConfig
    )
    for name, settings in SETTINGS_OF_SPARSE.items()
}
CASES = {
    "learned positions": Case(positions="learned_absolute"),
    "learned positions, given mask": Case(positions="learned_absolute", has_mask=True),
    "grouped queries": Case({"num_query_groups": 2}),
    "sliding window": Case({"window_size": (5, 0)}),
    "latent attention": Case(LATENT | {"rope_type": "rope"}, config=MLATransformerConfig),
    "latent attention, yarn": Case(LATENT | {"rope_type": "yarn"}, config=MLATransformerConfig),
    "further tokens, one layer, experts": Case(
        REPEATED | ROUTED | {"moe_router_load_balancing_type": "aux_loss"}
    ),
    "experts": Case(ROUTED | {"moe_router_load_balancing_type": "aux_loss"}),
    "experts, by sequence": Case(ROUTED | {"moe_router_load_balancing_type": "seq_aux_loss"}),
    "experts, loss per token": Case(
        ROUTED
        | {
            "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
            "moe_aux_loss_coeff": [0.1, 0.2],
            "calculate_per_token_loss": True,
        }
    ),
    "further tokens": Case({"mtp_num_layers": 2}),
    "further tokens, loss per token": Case(
        {"mtp_num_layers": 2, "calculate_per_token_loss": True}, positions="learned_absolute"
    ),
    "full recompute": Case(FULL),
    "sparse attention": Case(SPARSE | LATENT | {"rope_type": "rope"}, config=MLATransformerConfig),
    **dict(at_night(*SPARSELY.items())),
    "experts, full recompute": Case(
        FULL
        | ROUTED
        | {
            "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
            "moe_aux_loss_coeff": [0.3, 0.2],
        }
    ),
    "experts, recomputed": Case(
        ROUTED
        | {
            "moe_router_load_balancing_type": "aux_loss",
            "recompute_granularity": "selective",
            "recompute_modules": ["moe"],
        }
    ),
    "further tokens, one layer": Case(REPEATED),
    "further tokens, one layer, full recompute": Case(REPEATED | FULL),
    "attention sinks": Case({"softmax_type": "learnable"}),
    "sliding window, off by one": Case({"softmax_type": "off-by-one", "window_size": (5, 0)}),
    "selective recompute": Case({"recompute_granularity": "selective"}),
}


def build(case: Case) -> GPTModel:
    settings: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "use_cpu_initialization": True,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "transformer_impl": "local",
    }
    latent = case.config is MLATransformerConfig
    config = case.config(**settings | case.settings)
    layer: Any = (
        sparse_layers(config)
        if config.experimental_attention_variant
        else get_gpt_layer_local_spec(
            num_experts=case.settings.get("num_moe_experts"), multi_latent_attention=latent
        )
    )
    prediction = get_gpt_mtp_block_spec(config, layer, False) if config.mtp_num_layers else None
    return GPTModel(
        config,
        layer,
        mtp_block_spec=prediction,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type=case.positions,
    )


def batch(case: Case, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator)
    mask = None
    if case.has_mask:  # causal within the two documents of a sample, as with --reset-attention-mask
        document = torch.arange(SEQUENCE) >= torch.tensor([[5], [9]])
        other = document[:, :, None] != document[:, None, :]
        mask = (torch.ones(SEQUENCE, SEQUENCE).triu(1).bool() | other)[:, None]
    return {
        "input_ids": tokens,
        "position_ids": torch.arange(SEQUENCE).expand(BATCH, -1),
        "attention_mask": mask,
        "labels": tokens.roll(-1, 1),
        "loss_mask": (torch.arange(SEQUENCE) != 6).float().expand(BATCH, -1),
    }


@contextmanager
def patched() -> Iterator[None]:
    """Patch Megatron so that the model accepts slices. The process must have groups."""
    modules = (
        gpt_model_slices,
        router,
        multi_token_slices,
        rotary_slices,
        yarn_slices,
        dot_product_attention,
        dsa,
        batches_by_slices,
    )
    with apply([patch for module in modules for patch in module.patches(PipelineConfig())]):
        yield


def run_whole(model: GPTModel, batches: Sequence[dict[str, Any]], dy: Tensor) -> list[Tensor]:
    losses = [model(**batch) for batch in batches]
    for loss in losses:
        loss.backward(dy)
    return losses


def run_slices(
    model: GPTModel, batches: Sequence[dict[str, Any]], dy: Tensor, lengths: Sequence[int]
) -> list[Tensor]:
    """Run all forward passes before the backward passes, so that several microbatches are stored,
    and return the losses."""
    parts: dict[tuple[int, Span], Tensor] = {}
    for number, batch in enumerate(batches):
        for span in spans(lengths):
            with running_slice.running(0, number, span):
                parts[number, span] = model(**batch)
    for number in range(len(batches)):
        for span in reversed(spans(lengths)):
            with running_slice.running(0, number, span, is_backward=True):
                parts[number, span].backward(dy[:, span.begin : span.end])
        running_slice.drop(0, number)
    assert running_slice.is_empty
    numbers = range(len(batches))
    return [torch.cat([parts[n, span] for span in spans(lengths)], 1) for n in numbers]


def run_shared(
    model: GPTModel, batches: Sequence[dict[str, Any]], dy: Tensor, lengths: Sequence[int]
) -> list[Tensor]:
    """Run as `run_slices` on context-parallel ranks that share the sequences, and sum gradients
    over them."""
    group = parallel_state.get_context_parallel_group()
    local = spans(lengths, group.rank(), group.size())
    with running_slice.step(local, group):
        parts: dict[tuple[int, Span], Tensor] = {}
        given: list[dict[str, Any]] = []
        for number, batch in enumerate(batches):
            with running_slice.running(0, number, local[0]):
                whole = {**batch, "dy": dy}
                given.append(utils.get_batch_on_this_cp_rank(whole, False, cp_group=group))
            dys = given[number].pop("dy")
            for span in local:
                with running_slice.running(0, number, span):
                    parts[number, span] = model(**given[number])
        for number in range(len(batches)):
            for span in reversed(local):
                with running_slice.running(0, number, span, is_backward=True):
                    parts[number, span].backward(dys[:, span.here])
            running_slice.drop(0, number)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    losses = [torch.zeros_like(dy) for _ in batches]
    for (number, span), loss in parts.items():
        losses[number][:, span.local.begin : span.local.end] = loss.detach()
    for loss in losses:
        dist.all_reduce(loss)
    return losses


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def logged() -> dict[str, float]:
    """Return the sums of the losses that routers and indexers have logged."""
    metrics = get_moe_metrics_tracker().metrics
    made = {name: float(entry.values.sum()) for name, entry in metrics.items()}
    if (of_indexers := DSAIndexerLossLoggingHelper.tracker.get("values")) is not None:
        made["indexers"] = float(of_indexers.sum())
    return made


def forget_logged() -> None:
    destroy_moe_metrics_tracker()
    DSAIndexerLossLoggingHelper.tracker.clear()


def compare(case: Case, lengths: Sequence[int]) -> None:
    torch.manual_seed(1)
    model = build(case)
    batches = [batch(case, seed) for seed in (2, 3)]
    dy = torch.rand(BATCH, SEQUENCE)
    forget_logged()
    expected_losses = run_whole(model, batches, dy)
    expected = {name: p.grad for name, p in model.named_parameters()}
    expected_log = logged()
    model.zero_grad()
    forget_logged()
    with patched():
        losses = run_slices(model, batches, dy, lengths)
    assert logged() == pytest.approx(expected_log, rel=1e-5)
    for got, wanted in zip(losses, expected_losses, strict=True):
        assert relative(got, wanted) < 1e-6
    for name, parameter in model.named_parameters():
        if expected[name] is None:  # the gradient of an indexer without a loss
            assert parameter.grad is None, name
        else:
            assert relative(parameter.grad, expected[name]) < 2e-6, name


@contextmanager
def one_rank() -> Iterator[None]:
    with apply(cpu.patches()), mock.patch.object(backends, "DotProductAttention", Attention):
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(0)
        yield


def all_cases(rank: int) -> None:
    with one_rank():
        for name, case in CASES.items():
            for lengths in (UNEVEN, *at_night(EVEN)):
                try:
                    compare(case, lengths)
                except BaseException as error:
                    error.add_note(f"{name}, slices of {lengths}")
                    raise


def test_losses_and_gradients_are_those_of_whole_sequences() -> None:
    values(run_ranks(1, all_cases))


SHARED = (
    "grouped queries",
    *at_night(
        "learned positions",
        "learned positions, given mask",
        "sliding window",
        "latent attention, yarn",
        "experts",
        "experts, by sequence",
        "attention sinks",
        "selective recompute",
    ),
    "experts, full recompute",
)
SHARED_LENGTHS = (8, 4, 2, 2)


def of_shared(rank: int) -> list[tuple[list[Tensor], dict[str, Any]]]:
    """Return losses and gradients of each case, in slices that the context-parallel ranks share."""
    made = []
    ranks = dist.get_world_size()
    with apply(cpu.patches()):
        parallel_state.initialize_model_parallel(context_parallel_size=ranks)
        model_parallel_cuda_manual_seed(0)
        for name in SHARED:
            case = CASES[name]
            torch.manual_seed(1)
            model = build(replace(case, settings={**case.settings, "context_parallel_size": ranks}))
            batches = [batch(case, seed) for seed in (2, 3)]
            dy = torch.rand(BATCH, SEQUENCE)
            if ranks == 1:
                losses = run_whole(model, batches, dy)
            else:
                with patched():
                    losses = run_shared(model, batches, dy, SHARED_LENGTHS)
            gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
            made.append(([loss.detach() for loss in losses], gradients))
    return made


def test_ranks_that_share_sequences_have_part_of_each_slice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each context-parallel rank has a part of each slice, with the losses and gradients of whole
    sequences. Megatron would give each rank a piece from the front and one from the back of the
    sequence."""
    context_parallel.install(monkeypatch, context_parallel.LocalAttention)
    (whole,), shared = (values(run_ranks(ranks, of_shared)) for ranks in (1, 2))
    for of_rank in shared:
        for name, expected, got in zip(SHARED, whole, of_rank, strict=True):
            for losses in zip(got[0], expected[0], strict=True):
                assert relative(*losses) < 1e-6, name
            for parameter, gradient in got[1].items():
                assert relative(gradient, expected[1][parameter]) < 2e-6, f"{name}: {parameter}"


def test_a_loss_that_does_not_depend_on_its_output_is_refused() -> None:
    """A loss function that ignores its argument is refused. A forward_step_func may compute the
    loss by itself, from the first slice alone, so the model would train on no other token."""
    call = StepCall(print, 1, False, False, None, False, 1)
    config = small_config(1, 1)
    early = torch.ones(1, 8, requires_grad=True)

    def gradient_of(loss: Callable[[Tensor], Tensor]) -> Tensor | None:
        def loss_function(output: Tensor) -> tuple[Tensor, dict[str, Any]]:
            return loss(output), {}

        output, model = torch.ones(1, 16), torch.nn.Identity()
        gradient, _ = loss_with_gradient(output, loss_function, model, config, call, [])
        return gradient

    for loss in (lambda output: early.mean(), lambda output: output.detach().mean()):
        with pytest.raises(ValueError, match="compute the loss from its argument, or drop"):
            gradient_of(loss)
    gradient = gradient_of(torch.mean)
    assert gradient is not None and gradient.unique().tolist() == [1 / 16]


def test_a_batch_that_was_cut_otherwise_is_refused() -> None:
    """A batch that was not cut by our function for slices is refused. Such a batch may have as many
    tokens as a slice, so a model would train on wrong numbers without an error."""
    (first, _) = shared = spans((8, 8), 0, 2)
    tokens = {"input_ids": torch.ones(1, 8), "position_ids": torch.ones(1, 8)}
    with (
        running_slice.running(0, 0, first),
        pytest.raises(ValueError, match="has not called that function"),
    ):
        cut_to_slice(tokens, first)
    with running_slice.step(shared, None), running_slice.running(0, 0, first):
        whole = {"tokens": torch.arange(16).expand(2, -1), "cu_seqlens": None}
        made = cut_by_slices(utils.get_batch_on_this_cp_rank, whole, False)
        assert made["tokens"].tolist() == [[*range(4), *range(8, 12)]] * 2
        assert cut_to_slice(tokens, first).keys() == tokens.keys()
        with pytest.raises(ValueError, match="positions in several dimensions"):
            cut_to_slice(tokens | {"position_ids": torch.ones(3, 1, 8)}, first)
        with pytest.raises(ValueError, match="the tokens of a batch has 12"):
            cut_by_slices(utils.get_batch_on_this_cp_rank, {"tokens": torch.ones(1, 12)}, False)
        with pytest.raises(ValueError, match="packed sequences"):
            cut_by_slices(utils.get_batch_on_this_cp_rank, {"cu_seqlens": torch.ones(2)}, False)
        running_slice.drop(0, 0)


def gradients_in_fp32(model: GPTModel, run: Callable[[], Any]) -> dict[str, Tensor]:
    """Return the gradients of ``run``, summed in float32 as Megatron does."""
    sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in model.named_parameters()}

    def add(name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            assert parameter.grad is not None
            sums[name] += parameter.grad
            parameter.grad = None

        return hook

    hooks = [p.register_post_accumulate_grad_hook(add(n)) for n, p in model.named_parameters()]
    run()
    for hook in hooks:
        hook.remove()
    return sums


def errors_in_bf16(rank: int) -> tuple[float, float]:
    """Return the relative error of all gradients in bf16, for whole sequences and for slices."""
    case = Case()
    with one_rank(), patched():
        torch.manual_seed(1)
        model = build(case).bfloat16()
        given, dy = [batch(case, 2)], torch.rand(BATCH, SEQUENCE).bfloat16()
        whole = gradients_in_fp32(model, lambda: run_whole(model, given, dy))
        sliced = gradients_in_fp32(model, lambda: run_slices(model, given, dy, EVEN))
        model.float()
        exact = gradients_in_fp32(model, lambda: run_whole(model, given, dy.float()))
    joined = [torch.cat([g.flatten() for g in grads.values()]) for grads in (whole, sliced, exact)]
    return relative(joined[0], joined[2]), relative(joined[1], joined[2])


@nightly("test_losses_and_gradients_are_those_of_whole_sequences")
def test_bf16_errors_are_not_above_those_of_whole_sequences() -> None:
    """In bf16 the gradients of slices have no larger rounding errors than those of whole sequences,
    because the sums of slices are shorter."""
    ((whole, sliced),) = values(run_ranks(1, errors_in_bf16))
    assert sliced < 1.1 * whole < 0.1


class Kernel(torch.autograd.Function):
    """Attention on [s, b, heads, channels] that saves what flash attention does: inputs, outputs,
    and a number for each query and head."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = torch.einsum("qbhc,kbhc->bhqk", query, key)
        masked = scores.masked_fill(_unseen(query, key), -torch.inf)
        out = torch.einsum("bhqk,kbhc->qbhc", masked.softmax(-1), value).contiguous()
        ctx.save_for_backward(query, key, value, out, masked.logsumexp(-1))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        raise AssertionError("this test looks only at what the kernel keeps")


def _unseen(query: Tensor, key: Tensor) -> Tensor:
    return torch.ones(len(query), len(key)).tril(len(key) - len(query)) == 0


def kernel(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    attn_mask_type: Any = None,
    attention_bias: Any = None,
    packed_seq_params: Any = None,
) -> Tensor:
    return Kernel.apply(query, key, value).flatten(2)


def held(number: int) -> int:
    """Return the bytes that the forward passes of a microbatch in ``number`` slices store for the
    backward pass."""
    torch.manual_seed(1)
    model = build(Case())
    local = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in local:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    outputs = []
    given = batch(Case(), 1)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        for span in spans([SEQUENCE // number] * number):
            with running_slice.running(0, 0, span):
                outputs.append(model(**given))
    running_slice.clear()
    return sum(saved.values())


def what_is_held(rank: int) -> list[int]:
    with one_rank(), mock.patch.object(DotProductAttention, "forward", kernel), patched():
        return [held(number) for number in (1, 2, 4, 8)]


def test_what_is_held_does_not_depend_on_the_number_of_slices() -> None:
    """The stored bytes of a microbatch do not depend on the number of slices. If keys and values
    were concatenated anew for each slice, 8 slices would store them 4.5 times."""
    (bytes_held,) = values(run_ranks(1, what_is_held))
    assert len(set(bytes_held)) == 1, bytes_held


def as_transformer_engine(
    layer: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, kind: AttnMaskType, *none: Any
) -> Tensor:
    """Attention that aligns causal masks as Transformer Engine's kernels do if there are fewer
    queries than keys."""
    scores = torch.einsum("qbhc,kbhc->bhqk", query, key)
    offset = {AttnMaskType.causal: 0, AttnMaskType.causal_bottom_right: len(key) - len(query)}[kind]
    unseen = torch.ones(len(query), len(key)).tril(offset) == 0
    probabilities = scores.masked_fill(unseen, -torch.inf).softmax(-1)
    return torch.einsum("bhqk,kbhc->qbhc", probabilities, value)


def test_transformer_engines_mask_is_aligned_to_the_bottom_right() -> None:
    """Slices call Transformer Engine's attention with the causal mask that is aligned to the bottom
    right. With its plain causal mask a slice's first query would attend to the first key only."""
    drawn = torch.randn(3, SEQUENCE, 1, 2, 4).unbind()
    layer = torch.nn.Module()
    run: Callable[..., Tensor] = attend_with_transformer_engine
    whole = run(as_transformer_engine, layer, *drawn, None, AttnMaskType.causal)
    parts = []
    for span in spans(UNEVEN):
        local = (tensor[span.begin : span.end] for tensor in drawn)
        with running_slice.running(0, 0, span):
            parts.append(run(as_transformer_engine, layer, *local, None, AttnMaskType.causal))
    running_slice.clear()
    torch.testing.assert_close(torch.cat(parts), whole)


def shared_by_transformer_engine(rank: int) -> tuple[Tensor, Tensor]:
    """Return two results of attention on this rank: over sequences that two ranks share, and over
    whole sequences."""
    torch.manual_seed(1)
    drawn = torch.randn(3, SEQUENCE, 1, 2, 4).unbind()
    group = dist.group.WORLD
    layer = bare(Bare)
    layer.cp_group = group

    def alone(layer: Any, *args: Any) -> Tensor:
        assert layer.cp_group is None, "its ring would take keys and values for a rank's part"
        return as_transformer_engine(layer, *args)

    made = torch.zeros(SEQUENCE, 1, 2, 4)
    run: Callable[..., Tensor] = attend_with_transformer_engine
    local = spans(SHARED_LENGTHS, rank, 2)
    with running_slice.step(local, group):
        for span in local:
            part = slice(span.local.begin, span.local.end)
            with running_slice.running(0, 0, span):
                made[part] = run(alone, layer, *(t[part] for t in drawn), None, AttnMaskType.causal)
        assert layer.cp_group is group
        running_slice.drop(0, 0)
    dist.all_reduce(made)
    query, key, value = drawn
    return made, as_transformer_engine(layer, query, key, value, None, AttnMaskType.causal)


def test_transformer_engines_ring_is_off_where_slices_gather_keys() -> None:
    for made, whole in values(run_ranks(2, shared_by_transformer_engine)):
        torch.testing.assert_close(made, whole)


def test_attention_that_is_not_causal_is_refused() -> None:
    (span, *_) = spans(EVEN)
    run: Callable[..., Tensor] = attend_with_transformer_engine
    with (
        running_slice.running(0, 0, span),
        pytest.raises(ValueError, match="needs causal attention, and a layer's mask is padding"),
    ):
        run(as_transformer_engine, None, *torch.ones(3, 4, 1, 1, 1), None, AttnMaskType.padding)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"decoder_input": torch.ones(1)}, "decoder_input: this combination"),
        ({"output_processor": print}, "output_processor: this combination"),
        ({"labels": torch.ones(2, 8)}, "sequences of 16 tokens, and .* with labels of 8"),
        ({"attention_mask": torch.ones(1, 1, 1, 16)}, "attention_mask of 1 tokens:"),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else "",
)
def test_calls_that_slices_do_not_go_with(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        cut_to_slice(given, spans(EVEN)[1])


def test_a_slice_has_its_part_of_each_argument() -> None:
    tokens = torch.arange(SEQUENCE).expand(BATCH, -1)
    mask = torch.arange(SEQUENCE * SEQUENCE).view(1, 1, SEQUENCE, SEQUENCE)
    given = {
        "input_ids": tokens,
        "position_ids": tokens.expand(3, BATCH, -1),
        "attention_mask": mask,
        "labels": None,
        "runtime_gather_output": True,
    }
    parts = cut_to_slice(given, Span(4, 8, SEQUENCE))
    assert parts.keys() == {"input_ids", "position_ids", "attention_mask"}
    assert parts["input_ids"].tolist() == [[4, 5, 6, 7]] * BATCH
    assert parts["position_ids"].shape == (3, BATCH, 4)
    assert torch.equal(parts["attention_mask"], mask[:, :, 4:8, :8])


class OtherAttention(DotProductAttention):
    """Attention class that the code for slices does not know."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError("tests look only at the class of this attention")


class Bare(torch.nn.Module):
    """Module that only carries attributes."""


def bare(kind: type[torch.nn.Module]) -> Any:
    """Return a module of ``kind`` without any contents."""
    made = kind.__new__(kind)
    torch.nn.Module.__init__(made)
    return made


def chunk_of(kind: type[torch.nn.Module], mixer: torch.nn.Module) -> torch.nn.Module:
    """Return a chunk of ``kind`` whose only layer mixes tokens with ``mixer``, wrapped as for
    training."""
    wrapper, layer = bare(Bare), bare(Bare)
    layer.self_attention, layer.cross_attention = mixer, IdentityOp()
    wrapper.module = bare(kind)
    wrapper.module.decoder = bare(Bare)
    wrapper.module.decoder.layers = torch.nn.ModuleList([layer])
    chunk: torch.nn.Module = wrapper
    return chunk


def attention(core: type[torch.nn.Module]) -> torch.nn.Module:
    made = bare(Bare)
    made.core_attention = bare(core)
    mixer: torch.nn.Module = made
    return mixer


def test_a_model_of_known_parts_is_taken() -> None:
    known = chunk_of(GPTModel, attention(DotProductAttention))
    assert accepts(refuse_unknown, [known])
    assert accepts(refuse_unknown, [chunk_of(GPTModel, IdentityOp())])
    assert not accepts(refuse_unknown, [known, chunk_of(GPTModel, attention(OtherAttention))])


def test_what_predicts_further_tokens_is_looked_at_too() -> None:
    chunk: Any = chunk_of(GPTModel, attention(DotProductAttention))
    other: Any = chunk_of(GPTModel, attention(OtherAttention))
    chunk.module.mtp, (layer,) = bare(Bare), (bare(Bare),)
    layer.mtp_model_layer = other.module.decoder.layers[0]
    chunk.module.mtp.layers = torch.nn.ModuleList([layer])
    with pytest.raises(ValueError, match="does not go with OtherAttention"):
        refuse_unknown([chunk])


@pytest.mark.parametrize(
    ("kind", "mixer", "why"),
    [
        (Bare, partial(attention, DotProductAttention), "requires a GPTModel, and in a Bare"),
        (GPTModel, partial(attention, OtherAttention), "does not go with OtherAttention"),
        (GPTModel, Bare, "does not go with Bare"),
    ],
)
def test_a_model_that_is_not_known_is_refused(
    kind: type[torch.nn.Module], mixer: Callable[[], torch.nn.Module], why: str
) -> None:
    """Slices refuse a model whose way of mixing tokens is unknown, because it would train on wrong
    numbers without an error."""
    with pytest.raises(ValueError, match=why):
        refuse_unknown([chunk_of(kind, mixer())])


def test_quantised_weights_require_their_first_gradient_first() -> None:
    """With slices, quantized weights are refused under some orders of passes: the weight gradient
    of a step's first forward pass must be computed before all others, and slices compute the first
    slice's gradient last. Weights that are not quantized allow any order."""
    problem = Problem(
        line(2), 4, uniform(line(2), 1, 1, 1), options=ScheduleOptions(slices=Slices(2))
    )
    schedule = build_program(choose("zb-h1"), problem).schedule
    settings = SimpleNamespace(
        transformer_impl="transformer_engine",
        gradient_accumulation_fusion=True,
        recompute_granularity=None,
        cuda_graph_impl="none",
    )
    refuse_order(settings, schedule)
    settings.fp8, settings.fp8_recipe = "hybrid", "mxfp8"
    with pytest.raises(ValueError, match=r"on stage 0 is 0W0\.1, .* run 0W0\.0 first"):
        refuse_order(settings, schedule)
