"""Tests of a GPTModel on rows in which answers share their prompts.

Losses and gradients are those of the separate sequences in Megatron's own unpatched model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core")

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import MLATransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

import megatron_ext
from megatron_ext.base.logger import logger
from megatron_ext.config import PipelineConfig
from megatron_ext.features.shared_prompts.adapter.attention_to_prompts import attend_to_prompts
from megatron_ext.features.shared_prompts.adapter.batch import SharedPromptBatch
from megatron_ext.features.shared_prompts.adapter.refused_settings import refuse_settings
from megatron_ext.features.shared_prompts.runtime.attended import attend, tokens_attended_to
from megatron_ext.features.shared_prompts.runtime.rows import shared_row
from megatron_ext.features.shared_prompts.settings import SharedPrompts
from megatron_ext.patches import cpu
from megatron_ext.patches.engine import apply
from megatron_ext.patches.features import needed_patches
from tests.helpers.combinations import at_night
from tests.helpers.packed import shared_prompts_on_the_cpu
from tests.helpers.ranks import run_ranks, values
from tests.helpers.storages import LiveStorages
from tests.patches.adapter.test_slices import (
    FULL,
    LATENT,
    ROUTED,
    VOCABULARY,
    Case,
    build,
    relative,
)

EXACT = PipelineConfig.parse(shared_prompts="exact")


@dataclass(frozen=True)
class Microbatch:
    """Sequences of a microbatch: the numbers of tokens of each and of its prompt, and the group
    with the same prompt."""

    lengths: tuple[int, ...]
    prompts: tuple[int, ...]
    groups: tuple[int, ...]
    multiple: int = 1

    @property
    def ids(self) -> list[tuple[int, ...]]:
        """Return a name for each token of the sequences. Tokens of a prompt have the same name in
        its whole group."""
        return [
            (group, -1, place) if place < prompt else (group, number, place)
            for number, (length, prompt, group) in enumerate(
                zip(self.lengths, self.prompts, self.groups, strict=True)
            )
            for place in range(length)
        ]


# The cases have two answers, an answer that ends with its prompt, a prompt of one token, a single
# sequence, and sequences of a group that are not next to each other; rows are padded to multiples
# of 8, 16 and so on.
MICROBATCHES = {
    "two answers": Microbatch((5, 7), (4, 4), (0, 0)),
    "several groups, in any order": Microbatch((6, 9, 4, 8, 5), (4, 2, 4, 2, 3), (7, 3, 7, 3, 9)),
    "no prefix, padding": Microbatch((3, 5, 6), (1, 1, 2), (0, 0, 1), multiple=8),
    "three answers, padding": Microbatch((12, 13, 16), (11, 11, 11), (0, 0, 0), multiple=4),
}


def drawn(random: Random) -> Microbatch:
    groups = [random.randrange(4) for _ in range(random.randint(1, 9))]
    prompt = [random.randint(1, 6) for _ in range(4)]
    prompts = [prompt[group] for group in groups]
    lengths = [prompt + random.randint(0, 5) for prompt in prompts]
    return Microbatch(tuple(lengths), tuple(prompts), tuple(groups), random.choice((1, 2, 8)))


def test_each_token_attends_to_its_sequence_up_to_itself() -> None:
    random = Random(1)
    for batch in (*MICROBATCHES.values(), *(drawn(random) for _ in range(300))):
        row = shared_row(batch.lengths, batch.prompts, batch.groups, batch.multiple)
        assert len(row.sources) % batch.multiple == 0
        seen: dict[int, list[int]] = {}
        for segment in row.segments:
            attended = row.attended(segment)
            for token in range(segment.begin, segment.end):
                seen[token] = attended[: len(attended) - (segment.end - 1 - token)]
        ids, begin = batch.ids, 0
        for length in batch.lengths:
            of_sequence = range(begin, begin + length)
            for place, token in enumerate(of_sequence):
                here = row.places[token]
                expected = [ids[t] for t in of_sequence[: place + 1]]
                assert [ids[row.sources[t]] for t in seen[here]] == expected, batch
                assert row.positions[here] == place
            begin += length
        assert row.longest >= max(batch.lengths)  # padding may be longer than a sequence


def test_a_prompt_but_its_last_token_comes_once() -> None:
    """A row contains the prompt of several answers once, without its last token. The last token
    comes with each answer, because its label differs."""
    row = shared_row([12, 10, 11], [8, 8, 8], ["a", "a", "a"])
    assert len(row.sources) == 7 + 5 + 3 + 4
    assert [(s.begin, s.end, s.parent) for s in row.segments] == [
        (0, 7, None),
        (7, 12, 0),
        (12, 15, 0),
        (15, 19, 0),
    ]
    alone = shared_row([12, 10], [8, 8], ["a", "b"])
    assert [segment.parent for segment in alone.segments] == [None, None]


def test_padding_is_no_longer_than_a_sequence() -> None:
    """Padding is cut into pieces no longer than a sequence. Rows that are padded to one length used
    to have positions up to the length of the padding, more than a model with learned positions
    has."""
    row = shared_row([10, 8], [4, 4], ["a", "a"], 64)
    assert len(row.sources) == 64 and row.longest == 10 and max(row.positions) == 9
    with pytest.raises(ValueError, match="multiple is 0: give a number of at least 1"):
        shared_row([10], [4], ["a"], 0)


def test_groups_may_be_a_tensor() -> None:
    """Groups may be given as a tensor, or as its elements. As dictionary keys, elements of a tensor
    equal only themselves, so a tensor of groups used to share no prompt."""
    numbers = [torch.tensor(figures) for figures in ([12, 10, 11], [8, 8, 8], [5, 5, 5])]
    given: Any = SharedPromptBatch
    batch = given(*numbers, 1, torch.device("cpu"))
    assert batch.position_ids.shape == (1, 7 + 5 + 3 + 4)
    in_a_list = given([12, 10, 11], [8, 8, 8], list(numbers[2]), 1, torch.device("cpu"))
    assert in_a_list.position_ids.shape == batch.position_ids.shape
    with pytest.raises(ValueError, match="are on meta, and each pass would wait"):
        given(*(number.to("meta") for number in numbers), 1, torch.device("cpu"))


# --- whole models

MLA = MLATransformerConfig
UNBALANCED = ROUTED | {"moe_router_load_balancing_type": "none", "moe_z_loss_coeff": None}
CASES = {
    "grouped queries": Case({"num_query_groups": 2}),
    "latent attention, yarn, full recompute": Case(
        FULL | LATENT | {"rope_type": "yarn"}, config=MLA
    ),
}
AT_NIGHT = {
    "learned positions": Case(positions="learned_absolute"),
    "sliding window": Case({"window_size": (5, 0)}),
    "latent attention": Case(LATENT | {"rope_type": "rope"}, config=MLA),
    "latent attention, yarn": Case(LATENT | {"rope_type": "yarn"}, config=MLA),
    "full recompute": Case(FULL),
    "selective recompute": Case({"recompute_granularity": "selective"}),
    "latent attention, recomputed": Case(
        LATENT
        | {
            "rope_type": "rope",
            "recompute_granularity": "selective",
            "recompute_modules": ["core_attn", "mla_up_proj"],
        },
        config=MLA,
    ),
    "experts, not balanced": Case(UNBALANCED),
}


@contextmanager
def patched() -> Iterator[None]:
    """Patch Megatron so that the model accepts rows with shared prompts. The process must have
    groups."""
    with apply(needed_patches(EXACT)):
        yield


def sequences(batch: Microbatch, seed: int) -> dict[str, list[Tensor]]:
    """Return tokens and labels of each sequence. A label is the next token; the last label is
    arbitrary."""
    generator = torch.Generator().manual_seed(seed)
    drawn: dict[tuple[int, ...], int] = {}
    for token in batch.ids:
        drawn.setdefault(token, int(torch.randint(VOCABULARY, (), generator=generator)))
    tokens = torch.tensor([drawn[token] for token in batch.ids]).split(batch.lengths)
    labels = [torch.cat([one[1:], one[:1]]) for one in tokens]
    return {"tokens": list(tokens), "labels": labels}


def run_apart(model: GPTModel, given: dict[str, list[Tensor]], dy: list[Tensor]) -> Tensor:
    losses = []
    for tokens, labels, weights in zip(given["tokens"], given["labels"], dy, strict=True):
        positions = torch.arange(len(tokens))[None]
        loss = model(tokens[None], positions, None, labels=labels[None])
        loss.backward(weights[None])
        losses.append(loss.detach())
    return torch.cat(losses, 1)


def run_together(
    model: GPTModel, batch: Microbatch, given: dict[str, list[Tensor]], dy: list[Tensor]
) -> Tensor:
    shared = megatron_ext.share_prompts(
        batch.lengths, batch.prompts, batch.groups, multiple=batch.multiple, device="cpu"
    )
    tokens, labels = (torch.cat(given[name])[None] for name in ("tokens", "labels"))
    output = model(
        shared.once(tokens),
        shared.position_ids,
        None,
        labels=shared.once(labels),
        packed_seq_params=shared.packed_seq_params,
    )
    losses = shared.in_sequences(output)
    losses.backward(torch.cat(dy)[None])
    return losses.detach()


def compare(case: Case) -> None:
    torch.manual_seed(1)
    model = build(case)
    for number, (name, batch) in enumerate(MICROBATCHES.items()):
        given = sequences(batch, number)
        # Gradients of all losses, also of those of prompts.
        dy = list(torch.rand(sum(batch.lengths)).split(batch.lengths))
        model.zero_grad()
        expected_losses = run_apart(model, given, dy)
        expected = {name: p.grad for name, p in model.named_parameters()}
        model.zero_grad()
        with patched():
            losses = run_together(model, batch, given, dy)
        assert relative(losses, expected_losses) < 1e-6, name
        for parameter, value in model.named_parameters():
            if expected[parameter] is None:
                assert value.grad is None
                continue
            assert relative(value.grad, expected[parameter]) < 2e-6, f"{name}: {parameter}"


def by_mask(
    model: GPTModel, tokens: Tensor, labels: Tensor, positions: Tensor, visible: Tensor
) -> Tensor:
    """Return the losses of one sequence by Megatron's own attention. Each token attends to those
    that the mask ``visible`` names."""
    for layer in model.decoder.layers:
        layer.self_attention.core_attention.scale_mask_softmax.attn_mask_type = (
            AttnMaskType.arbitrary
        )
    losses: Tensor = model(tokens, positions, ~visible[None, None], labels=labels)
    for layer in model.decoder.layers:
        layer.self_attention.core_attention.scale_mask_softmax.attn_mask_type = AttnMaskType.causal
    return losses


def compare_losses_once(rank: int) -> None:
    """With `losses-once` the routers' losses are those that Megatron's own model computes if the
    prompt and its answers are one sequence with a tree as attention mask. For separate sequences,
    routers' losses count the prompt once for each answer."""
    with apply(cpu.patches()):
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(0)
        torch.manual_seed(1)
        model = build(Case(ROUTED, positions="learned_absolute"))
        batch = MICROBATCHES["several groups, in any order"]
        given, total = sequences(batch, 1), sum(batch.lengths)
        tokens, labels = (torch.cat(given[name])[None] for name in ("tokens", "labels"))
        dy = torch.rand(total)
        made: dict[str, tuple[Tensor, dict[str, Tensor]]] = {}

        def add(name: str, losses: Tensor) -> None:
            losses.backward(dy[None])
            gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            made[name] = losses.detach(), gradients
            model.zero_grad()

        with apply(needed_patches(PipelineConfig.parse(shared_prompts="losses-once"))):
            shared = megatron_ext.share_prompts(
                batch.lengths, batch.prompts, batch.groups, device="cpu"
            )
            row, labels_of_row = shared.once(tokens), shared.once(labels)
            packed, positions = shared.packed_seq_params, shared.position_ids
            output = model(row, positions, None, labels=labels_of_row, packed_seq_params=packed)
            add("ours", shared.in_sequences(output))
        assert packed.shared is not None
        tree = torch.zeros(row.size(1), row.size(1), dtype=torch.bool)
        for segment in packed.shared.row.segments:
            for token in range(segment.begin, segment.end):
                seen = torch.tensor(packed.shared.row.attended(segment))
                tree[token, seen[seen <= token]] = True
        add("tree", shared.in_sequences(by_mask(model, row, labels_of_row, positions, tree)))
        apart = torch.block_diag(*(torch.ones(n, n).tril() for n in batch.lengths)) > 0
        places = torch.cat([torch.arange(length) for length in batch.lengths])[None]
        add("apart", by_mask(model, tokens, labels, places, apart))

    (losses, gradients), (expected_losses, expected), (_, of_all) = made.values()
    assert relative(losses, expected_losses) < 1e-6 and gradients.keys() == expected.keys()
    for parameter, value in gradients.items():
        assert relative(value, expected[parameter]) < 2e-6, parameter
    routers = [name for name in gradients if name.endswith("router.weight")]
    assert routers and all(relative(gradients[name], of_all[name]) > 1e-3 for name in routers)


def test_losses_of_experts_count_a_prompt_once_if_that_is_meant() -> None:
    with shared_prompts_on_the_cpu():
        values(run_ranks(1, compare_losses_once))


def said_by(model: GPTModel, batch: Microbatch | None) -> str:
    """Return the log of a pass over ``batch``; if it is None, over sequences that share nothing."""
    said: list[str] = []
    with mock.patch.object(logger, "_log", lambda level, text, *more, **named: said.append(text)):
        _pass(model, batch)
    return "\n".join(said)


def _pass(model: GPTModel, batch: Microbatch | None) -> None:
    if batch is None:
        tokens = torch.zeros(1, 4, dtype=torch.long)
        model(tokens, torch.arange(4)[None], None, labels=tokens)
    else:
        given = sequences(batch, 1)
        run_together(model, batch, given, list(torch.rand(sum(batch.lengths)).split(batch.lengths)))


def test_a_microbatch_that_is_not_described_is_reported_once() -> None:
    """One warning says that microbatches are not described by `share_prompts`. A training by
    pretrain_gpt.py, which describes none, shares no prompt, and used to give no warning."""

    def on_rank(rank: int) -> list[str]:
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(0)
        model = build(Case())
        batch = MICROBATCHES["two answers"]
        with patched():
            with torch.no_grad():
                said = [said_by(model, None)]  # an evaluation comes first
            said += [said_by(model, one) for one in (None, None, batch)]
        with patched():
            return [*said, *(said_by(model, one) for one in (batch, None))]

    with apply(cpu.patches()), shared_prompts_on_the_cpu():
        (said,) = values(run_ranks(1, on_rank))
    warning = "--pipeline-shared-prompts exact does nothing for the first microbatch"
    assert [warning in one for one in said] == [False, True, False, False, False, False]
    assert ["computed once" in one for one in said] == [False, False, False, True, True, False]


def all_cases(rank: int) -> None:
    with apply(cpu.patches()):
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(0)
        for name, case in (CASES | dict(at_night(*AT_NIGHT.items()))).items():
            try:
                compare(case)
            except BaseException as error:
                error.add_note(name)
                raise


def test_losses_and_gradients_are_those_of_sequences_apart() -> None:
    with shared_prompts_on_the_cpu():
        values(run_ranks(1, all_cases))


# --- attention over shared prompts


class Kernel(torch.autograd.Function):
    """Attention of segments that saves only its arguments for the backward pass, as flash attention
    does."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, ends: list[tuple[int, int]]
    ) -> Tensor:
        ctx.ends = ends
        ctx.save_for_backward(query, key, value)
        return by_segment(query, key, value, ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            output = by_segment(query, key, value, ctx.ends)
        return *torch.autograd.grad(output, (query, key, value), gradient), None


def by_segment(query: Tensor, key: Tensor, value: Tensor, ends: list[tuple[int, int]]) -> Tensor:
    """Return the attention of [tokens, channels]; ``ends`` has the numbers of queries and keys of
    each segment."""
    queries, keys = ([*column] for column in zip(*ends, strict=True))
    parts = []
    for q, k, v in zip(query.split(queries), key.split(keys), value.split(keys), strict=True):
        visible = torch.ones(len(q), len(k)).tril(len(k) - len(q)) > 0
        parts.append((q @ k.T).masked_fill(~visible, -torch.inf).softmax(-1) @ v)
    return torch.cat(parts)


@pytest.mark.parametrize("prefix", [3, 300])
def test_autograd_saves_no_copy_of_a_prefix(prefix: int) -> None:
    """Autograd saves no copy of a shared prefix for each answer. If the keys and values of four
    answers were saved separately, they would be 8 copies of the prefix."""
    row = shared_row([prefix + 3] * 4, [prefix + 1] * 4, [0] * 4)
    attended = tokens_attended_to(row, torch.device("cpu"))
    torch.manual_seed(0)
    leaves = [torch.randn(len(row.sources), 4, requires_grad=True) for _ in range(3)]
    query, key, value = (leaf * 1 for leaf in leaves)
    ends = [(s.length, len(row.attended(s))) for s in row.segments]
    live = LiveStorages()
    with live:
        output = attend(attended, lambda k, v: Kernel.apply(query, k, v, ends), key, value)
    assert sum(live.sizes().values()) == output.nbytes
    dy = torch.randn_like(output)
    got = torch.autograd.grad(output, leaves, dy)

    visible = torch.zeros(len(row.sources), len(row.sources), dtype=torch.bool)
    for segment in row.segments:
        for token in range(segment.begin, segment.end):
            seen = torch.tensor(row.attended(segment))
            visible[token, seen[seen <= token]] = True
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    scores = (exact[0] @ exact[1].T).masked_fill(~visible, -torch.inf)
    expected = scores.softmax(-1) @ exact[2]
    assert relative(output.detach().double(), expected.detach()) < 1e-6
    wanted = torch.autograd.grad(expected, exact, dy.double())
    for gradient, exactly in zip(got, wanted, strict=True):
        assert relative(gradient.double(), exactly) < 1e-6


def test_gradients_of_a_prefix_are_summed_in_fp32() -> None:
    """Gradients of a shared prefix are summed over the answers in fp32. In bf16 a single answer
    would add nothing to the sum of 256 equal ones."""
    answers = 300
    row = shared_row([3] * answers, [2] * answers, [0] * answers)
    attended = tokens_attended_to(row, torch.device("cpu"))
    key = torch.zeros(len(row.sources), 1, dtype=torch.bfloat16, requires_grad=True)
    attend(attended, lambda k, v: k.sum(), key, key.detach()).backward()
    assert key.grad is not None
    assert key.grad[0] == torch.tensor(answers + 1.0).bfloat16() and key.grad[1:].eq(1).all()


def test_transformer_engine_gets_each_answer_behind_its_prompt() -> None:
    given: list[Any] = []

    def kernel(layer: Any, query: Tensor, *more: Any) -> Tensor:
        given.extend(more)
        return query

    with patched():
        shared = megatron_ext.share_prompts([7, 6, 3], [5, 5, 2], [0, 0, 1], device="cpu")
    own = torch.arange(len(shared.position_ids[0])).view(-1, 1, 1).float()
    causal = AttnMaskType.causal
    packed = shared.packed_seq_params
    attend_to_prompts(kernel, None, own, own, own, None, causal, packed_seq_params=packed)
    key, value, mask, kind, bias, params = given
    expected = [*range(4), *range(4), 4, 5, 6, *range(4), 7, 8, 9, 10, 11]
    assert key.flatten().tolist() == value.flatten().tolist() == expected
    assert (mask, kind.name, bias) == (None, "padding_causal_bottom_right", None)
    assert params.qkv_format == "thd" and type(params) is PackedSeqParams
    assert params.cu_seqlens_q.tolist() == [0, 4, 7, 9, 12]
    assert params.cu_seqlens_kv.tolist() == [0, 4, 11, 17, 20]
    assert (params.max_seqlen_q, params.max_seqlen_kv) == (4, 7)
    assert params.cu_seqlens_q.dtype == params.cu_seqlens_kv.dtype == torch.int32
    assert shared.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 4, 5, 0, 1, 2]]
    with pytest.raises(ValueError, match="needs causal attention, and the mask of a layer is no_"):
        attend_to_prompts(
            kernel, None, own, own, own, None, AttnMaskType.no_mask, packed_seq_params=packed
        )


# --- refusals


@pytest.mark.parametrize(
    ("lengths", "prompts", "groups", "why"),
    [
        ([5], [6], [0], "sequence 0 has 5 tokens and a prompt of 6: give prompts of at least one"),
        ([5], [0], [0], "sequence 0 has 5 tokens and a prompt of 0"),
        ([5, 6], [3, 4], "aa", "sequence 1 of group 'a' has a prompt of 4 .* has one of 3"),
        ([5, 6], [3], [0, 0], "2 lengths, 1 prompts and 2 groups are given"),
        ([], [], [], "0 lengths"),
        ([5, 6], [3, 3], [[7], [7]], "cannot be keys of a dictionary: give each sequence the"),
    ],
)
def test_sequences_that_are_refused(
    lengths: list[int], prompts: list[int], groups: Sequence[object], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        shared_row(lengths, prompts, groups)


def test_prompts_that_differ_are_refused() -> None:
    """Sequences of one group whose prompts differ are refused. They would train with another
    sequence's prompt without a message."""
    with patched():
        shared = megatron_ext.share_prompts([4, 4], [3, 3], [0, 0], device="cpu")
    shared.once(torch.tensor([[1, 2, 3, 4, 1, 2, 3, 5]]))
    # a value that is no number, such as that of a token that does not count, is equal to itself
    shared.once(torch.tensor([[1.0, torch.nan, 3, 4, 1, torch.nan, 3, torch.nan]]))
    # the last token of a prompt belongs to each sequence
    shared.once(torch.tensor([[1, 2, 3, 4, 1, 2, 9, 5]]))
    with pytest.raises(ValueError, match="prompts that differ: give sequences with different"):
        shared.once(torch.tensor([[1, 2, 3, 4, 1, 9, 3, 5]]))
    with pytest.raises(
        ValueError, match=r"once .* of shape \[1, 7\]: give a tensor of shape \[1, 8,"
    ):
        shared.once(torch.zeros(1, 7))
    with pytest.raises(ValueError, match=r"in_sequences .*: give a tensor of shape \[1, 6,"):
        shared.in_sequences(torch.zeros(1, 8))


def test_a_description_without_the_setting_is_refused() -> None:
    """Describing shared prompts without MEGATRON_EXT_SHARED_PROMPTS is refused. Megatron's own
    attention would treat answers as documents without a prompt."""
    with pytest.raises(ValueError, match="MEGATRON_EXT_SHARED_PROMPTS=exact"):
        megatron_ext.share_prompts([4, 4], [3, 3], [0, 0], device="cpu")


def test_a_model_that_does_not_know_the_setting_fails() -> None:
    """The description of shared prompts has no ends of documents, so a model other than GPTModel,
    which our patches do not know, fails in its layers and does not train on wrong numbers."""
    with patched():
        shared = megatron_ext.share_prompts([4, 4], [3, 3], [0, 0], device="cpu")
    params = shared.packed_seq_params
    assert params.qkv_format is params.cu_seqlens_q is params.max_seqlen_q is None


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"context_parallel_size": 2}, "--context-parallel-size 1"),
        ({"mtp_num_layers": 1}, "drop --mtp-num-layers"),
        ({"experimental_attention_variant": "dsa"}, "drop --experimental-attention-variant"),
        ({"hybrid_layer_pattern": "M*"}, "a hybrid model carries a state over the answers"),
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl none"),
        ({"fp8_dot_product_attention": True}, "drop --fp8-dot-product-attention"),
        ({"fine_grained_activation_offloading": True}, "gathers again must stay"),
        ({"overlap_moe_expert_parallel_comm": True}, "plans of pairs"),
        ({"num_experts": 8, "moe_expert_capacity_factor": 1.0}, "drop --moe-expert-capacity"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], why: str) -> None:
    refuse_settings(SimpleNamespace(context_parallel_size=1), SharedPrompts.EXACT)
    for mode in (SharedPrompts.EXACT, SharedPrompts.LOSSES_ONCE):
        with pytest.raises(ValueError, match=f"{mode} does not go with .*{why}"):
            refuse_settings(SimpleNamespace(**settings), mode)


@pytest.mark.parametrize(
    "settings",
    [
        {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2},
        {
            "moe_router_load_balancing_type": ["seq_aux_loss", "aux_loss"],
            "moe_aux_loss_coeff": [0.0, 1e-2],
        },
        {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0},
        {"moe_z_loss_coeff": 1e-3},
        {"moe_router_enable_expert_bias": True},
    ],
)
def test_what_balances_experts_is_refused_unless_it_may_count_a_prompt_once(
    settings: dict[str, Any],
) -> None:
    experts = SimpleNamespace(num_moe_experts=8, **settings)
    with pytest.raises(ValueError, match="write --pipeline-shared-prompts losses-once if that is"):
        refuse_settings(experts, SharedPrompts.EXACT)
    refuse_settings(experts, SharedPrompts.LOSSES_ONCE)
    refuse_settings(SimpleNamespace(num_moe_experts=None, **settings), SharedPrompts.EXACT)
    no_loss = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.0}
    refuse_settings(SimpleNamespace(num_moe_experts=8, **no_loss), SharedPrompts.EXACT)


def test_models_with_other_attention_and_passes_in_pairs_are_refused() -> None:
    def on_rank(rank: int) -> None:
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(0)
        model = build(Case())  # the model has Megatron's own attention
        with patched():
            shared = megatron_ext.share_prompts([4, 4], [3, 3], [0, 0], device="cpu")
            tokens = torch.zeros(1, 5, dtype=torch.long)
            call = (tokens, shared.position_ids, None)
            with pytest.raises(ValueError, match="not go with DotProductAttention: answers would"):
                model(*call, packed_seq_params=shared.packed_seq_params)
            with pytest.raises(ValueError, match="does not go with overlapped forward"):
                model.build_schedule_plan(*call, packed_seq_params=shared.packed_seq_params)

    with apply(cpu.patches()):
        values(run_ranks(1, on_rank))


def test_tensors_of_another_length_than_the_row_are_refused() -> None:
    """A model that is called with the tokens of the separate sequences is refused, and so is a
    stage that receives another number of rows. Attention used to compute nothing behind the row's
    end, and the training continued with arbitrary memory contents."""

    def on_rank(rank: int) -> None:
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(0)
        model: Any = build(Case())
        with patched():
            shared = megatron_ext.share_prompts([4, 4], [3, 3], [0, 0], device="cpu")
            all_tokens = torch.zeros(1, 8, dtype=torch.long)
            tokens, packed = shared.once(all_tokens), shared.packed_seq_params
            call = partial(model, attention_mask=None, packed_seq_params=packed)
            positions = shared.position_ids
            with pytest.raises(ValueError, match=r"input_ids of 8 tokens: .* once\(input_ids\)"):
                call(all_tokens, positions, labels=tokens)
            with pytest.raises(ValueError, match="position_ids of 8 tokens: call it with position"):
                call(tokens, all_tokens, labels=tokens)
            with pytest.raises(ValueError, match=r"row of 6 tokens, .* labels of 8 tokens"):
                call(tokens, positions, labels=all_tokens)
            model.pre_process = model.decoder.pre_process = False
            for rows in (8, 6):
                model.set_input_tensor([torch.zeros(rows, 1, model.config.hidden_size)])
                refused = pytest.raises(
                    ValueError, match=r"received 8 .* variable_seq_lengths=True"
                )
                with refused if rows == 8 else nullcontext():
                    call(all_tokens, all_tokens, labels=tokens)

    with apply(cpu.patches()), shared_prompts_on_the_cpu():
        values(run_ranks(1, on_rank))


def test_a_hybrid_model_is_refused() -> None:
    """A hybrid model is refused under shared prompts. It used to be accepted, because only
    GPTModel's call had the check: the layers of a hybrid model found no ends of documents, or took
    the row for one sequence."""
    with patched():
        shared = megatron_ext.share_prompts([4, 4], [3, 3], [0, 0], device="cpu")
        call: Any = HybridModel.forward
        with pytest.raises(ValueError, match="does not go with a hybrid model, whose layers"):
            call(None, None, shared.position_ids, None, packed_seq_params=shared.packed_seq_params)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"schedule": "zb-h1", "slices": "2"}, "exact does not go with --pipeline-slices 2"),
        (
            {"schedule": "zb-h1", "activation_offload": "full"},
            "exact does not go with --pipeline-activation-offload full",
        ),
    ],
)
def test_settings_of_ours_that_are_refused(settings: dict[str, str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        PipelineConfig.parse(shared_prompts="exact", **settings)
