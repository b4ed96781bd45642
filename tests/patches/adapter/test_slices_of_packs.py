"""Tests of a GPTModel that runs packed sequences in slices, which are cut anywhere.

The tokens that a token attends to, its position and its gradients are those of whole packs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core")

from megatron.core import parallel_state
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import MLATransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron_ext.adapter.slices.model_call import cut_to_slice
from megatron_ext.adapter.slices.packs import attended_part, places_in_documents, read_pack
from megatron_ext.adapter.slices.slice_attention import attend_with_transformer_engine
from megatron_ext.patches import cpu
from megatron_ext.patches.engine import apply
from megatron_ext.runtime.slices.running_slice import Span, running_slice, spans
from tests.helpers.combinations import at_night
from tests.helpers.packed import packed_params, sliced_packs_on_the_cpu
from tests.helpers.ranks import run_ranks, values
from tests.patches.adapter.test_slices import (
    EVEN,
    FULL,
    LATENT,
    REPEATED,
    ROUTED,
    SEQUENCE,
    UNEVEN,
    VOCABULARY,
    Case,
    build,
    patched,
    relative,
    run_slices,
    run_whole,
)

Attend = Callable[..., Tensor]


@dataclass(frozen=True)
class Documents:
    """Documents of a pack of 16 tokens: the length of each, and the padding behind it."""

    lengths: tuple[int, ...]
    padding: tuple[int, ...] | None = None

    def params(self, **more: Any) -> PackedSeqParams:
        made = packed_params(self.lengths, self.padding)
        longest = 1 + max(self.places)  # Megatron's frequencies cover padding too
        return replace(made, max_seqlen_q=longest, max_seqlen_kv=longest, **more)

    @property
    def numbers(self) -> list[int]:
        """Return the number of each token's document; -1 for padding."""
        padding = self.padding or (0,) * len(self.lengths)
        pieces = zip(self.lengths, padding, strict=True)
        return [
            number
            for document, (tokens, behind) in enumerate(pieces)
            for number in [document] * tokens + [-1] * behind
        ]

    @property
    def places(self) -> list[int]:
        """Return each token's position in its document; positions go on in the padding."""
        padding = self.padding or (0,) * len(self.lengths)
        return [
            place
            for tokens, behind in zip(self.lengths, padding, strict=True)
            for place in range(tokens + behind)
        ]


PACKS = {
    "one document": Documents((16,)),
    "a cut one token into a document": Documents((6, 10)),
    "a document over all slices": Documents((2, 13, 1)),
    "many, some empty": Documents((1, 0, 3, 4, 0, 0, 5, 3, 0)),
    "padding between": Documents((3, 2, 4, 0), (1, 3, 2, 1)),
    "padding, from before the first cut to behind the second": Documents((5, 2), (8, 1)),
}


def drawn(random: Random) -> Documents:
    cuts = sorted(random.choices(range(SEQUENCE + 1), k=2 * random.randint(0, 4) + 1))
    steps = [b - a for a, b in itertools.pairwise([0, *cuts, SEQUENCE])]
    return Documents(tuple(steps[::2]), tuple(steps[1::2]))


def attended_by(documents: Documents, span: Span) -> dict[int, list[int]]:
    """Return, for each query of the slice, the tokens of the pack that it attends to by the
    parameters of attention."""
    with running_slice.running(0, 0, span):
        cut_to_slice({"packed_seq_params": documents.params()}, span)
        part = attended_part(span)
    running_slice.drop(0, 0)
    params, seen = part.params, {}
    of_queries, of_keys = (
        (ends if padded is None else padded, ends.diff())
        for ends, padded in (
            (params.cu_seqlens_q, params.cu_seqlens_q_padded),
            (params.cu_seqlens_kv, params.cu_seqlens_kv_padded),
        )
    )
    assert int(of_queries[0][-1]) == span.end - span.begin
    assert int(of_keys[0][-1]) == span.end - part.begin
    assert params.max_seqlen_q <= params.max_seqlen_kv <= SEQUENCE
    for q, queries, k, keys in zip(*map(list, (*of_queries, *of_keys)), strict=False):
        for number in range(int(queries)):
            first = part.begin + int(k)
            last = first + int(keys) - int(queries) + number
            seen[span.begin + int(q) + number] = list(range(first, last + 1))
    return seen


def test_each_token_attends_to_its_document_up_to_itself() -> None:
    """In slices of packed sequences each token attends to its own document up to itself. Packs and
    cuts are random: slices that end with a document, empty documents, padding."""
    random = Random(1)
    for documents in (*PACKS.values(), *(drawn(random) for _ in range(300))):
        cuts = sorted(random.sample(range(1, SEQUENCE), 3))
        lengths = [b - a for a, b in itertools.pairwise([0, *cuts, SEQUENCE])]
        seen: dict[int, list[int]] = {}
        for span in spans(lengths):
            seen |= attended_by(documents, span)
        numbers = documents.numbers
        expected = {
            token: [key for key in range(token + 1) if numbers[key] == document]
            for token, document in enumerate(numbers)
            if document >= 0
        }
        assert seen == expected, f"{documents} in slices of {lengths}"


def test_positions_begin_anew_in_each_document() -> None:
    for documents in PACKS.values():
        places: list[int] = []
        for span in spans(UNEVEN):
            with running_slice.running(0, 0, span):
                cut_to_slice({"packed_seq_params": documents.params()}, span)
                places += places_in_documents(span).tolist()
        running_slice.drop(0, 0)
        assert places == documents.places


# --- whole models

MLA = MLATransformerConfig
CASES = {
    "grouped queries": Case({"num_query_groups": 2}),
    "latent attention, yarn": Case(LATENT | {"rope_type": "yarn"}, config=MLA),
    "further tokens, experts, full recompute": Case(
        REPEATED
        | FULL
        | ROUTED
        | {
            "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
            "moe_aux_loss_coeff": [0.3, 0.2],
        }
    ),
}
AT_NIGHT = {
    "learned positions": Case(positions="learned_absolute"),
    "sliding window": Case({"window_size": (5, 0)}),
    "latent attention": Case(LATENT | {"rope_type": "rope"}, config=MLA),
    "further tokens": Case({"mtp_num_layers": 2}),
    "further tokens, loss per token": Case(
        {"mtp_num_layers": 2, "calculate_per_token_loss": True}, positions="learned_absolute"
    ),
    "experts": Case(ROUTED | {"moe_router_load_balancing_type": "aux_loss"}),
    "experts, by sequence": Case(ROUTED | {"moe_router_load_balancing_type": "seq_aux_loss"}),
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
}


def batch(documents: Documents, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(VOCABULARY, (2, 1, SEQUENCE), generator=generator)
    return {
        "input_ids": tokens,
        "position_ids": torch.tensor([documents.places]),
        "attention_mask": None,
        "labels": labels,
        "loss_mask": (torch.arange(SEQUENCE) != 6).float()[None],
        "packed_seq_params": documents.params(),
    }


def compare(case: Case, lengths: Sequence[int], packs: Sequence[Documents]) -> None:
    torch.manual_seed(1)
    model = build(case)
    batches = [batch(documents, seed) for seed, documents in enumerate(packs)]
    dy = torch.rand(1, SEQUENCE)
    expected_losses = run_whole(model, batches, dy)
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    with patched():
        losses = run_slices(model, batches, dy, lengths)
    for got, wanted in zip(losses, expected_losses, strict=True):
        assert relative(got, wanted) < 1e-6
    for name, parameter in model.named_parameters():
        assert relative(parameter.grad, expected[name]) < 2e-6, name


def all_cases(rank: int) -> None:
    with apply(cpu.patches()):
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(0)
        for name, case in (CASES | dict(at_night(*AT_NIGHT.items()))).items():
            # Multi-token prediction shifts tokens by cu_seqlens_q only, which is wrong if there is
            # padding between documents.
            shifts = "mtp_num_layers" in case.settings
            packs = [p for p in PACKS.values() if not (shifts and p.padding)]
            for lengths in (UNEVEN, *at_night(EVEN)):
                try:
                    compare(case, lengths, packs)
                except BaseException as error:
                    error.add_note(f"{name}, slices of {lengths}")
                    raise


def test_losses_and_gradients_are_those_of_whole_packs() -> None:
    """Losses and gradients of packs in slices are those of whole packs. Multi-token prediction used
    to look only within a slice, had no next token at the slice's end, and changed losses by 2e-3
    without an error."""
    with sliced_packs_on_the_cpu():
        values(run_ranks(1, all_cases))


# --- arguments of Transformer Engine's functions


def fused_kernel(
    t: Tensor, cu_seqlens: Tensor, freqs: Tensor, *, interleaved: bool, **ranks: int
) -> Tensor:
    """Stand-in for Transformer Engine's kernel of rotary positions, in which each document begins
    with the first frequency."""
    parts = [
        rope_utils._apply_rotary_pos_emb_bshd(
            part.unsqueeze(1), freqs[: len(part)], rotary_interleaved=interleaved
        ).squeeze(1)
        for part in t.split(cu_seqlens.diff().tolist())
    ]
    return torch.cat(parts)


def fused_positions(rank: int) -> None:
    with apply(cpu.patches()):
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(0)
        compare(Case({"apply_rope_fusion": True}), UNEVEN, [*PACKS.values()])


def test_the_fused_kernel_of_positions_sees_one_document() -> None:
    """For a slice of a pack the fused kernel of rotary positions is called with one document at a
    time, because the kernel begins at the first position only."""
    with (
        mock.patch.object(rope_utils, "fused_apply_rotary_pos_emb", object()),
        mock.patch.object(rope_utils, "fused_apply_rotary_pos_emb_thd", fused_kernel),
        sliced_packs_on_the_cpu(),
    ):
        values(run_ranks(1, fused_positions))


def given_to_kernel(documents: Documents, span: Span) -> tuple[Tensor, str, PackedSeqParams]:
    """Return the keys, the mask and the parameters that Transformer Engine's attention gets for a
    slice."""
    given: list[Any] = []

    def kernel(
        layer: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, kind: Any, *more: Any
    ) -> Tensor:
        given.append((key, kind.name, more[-1]))
        return query

    attend: Attend = attend_with_transformer_engine
    rows = torch.arange(SEQUENCE).view(-1, 1, 1)
    layer = SimpleNamespace()
    for before in spans(UNEVEN):
        with running_slice.running(0, 0, before):
            call = {"packed_seq_params": documents.params(pad_between_seqs=None)}
            packed = cut_to_slice(call, before)["packed_seq_params"]
            own = rows[before.begin : before.end]
            attend(
                kernel,
                id(layer),
                own,
                own,
                own,
                None,
                AttnMaskType.causal,
                packed_seq_params=packed,
            )
        if before == span:
            break
    running_slice.drop(0, 0)
    return given[-1]


def test_transformer_engines_attention_gets_the_first_document_from_its_begin() -> None:
    """Transformer Engine's attention gets the keys of a slice's first document from that document's
    beginning, with masks aligned to the bottom right, because there are fewer queries than keys."""
    first, second, third, _ = spans(UNEVEN)  # slices end at 7, 12, 15 and 16
    documents = Documents((3, 6, 2, 5))
    keys, mask, params = given_to_kernel(documents, first)
    assert (keys.flatten().tolist(), mask) == ([*range(7)], "causal")
    assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == [0, 3, 7]
    keys, mask, params = given_to_kernel(documents, second)
    assert (keys.flatten().tolist(), mask) == ([*range(3, 12)], "padding_causal_bottom_right")
    assert params.cu_seqlens_q.tolist() == [0, 2, 4, 5]
    assert params.cu_seqlens_kv.tolist() == [0, 6, 8, 9]
    assert (params.max_seqlen_q, params.max_seqlen_kv) == (2, 6)
    assert params.cu_seqlens_q_padded is params.cu_seqlens_kv_padded is None
    keys, mask, params = given_to_kernel(
        Documents((3, 9, 4)), third
    )  # this slice begins where a document begins
    assert (keys.flatten().tolist(), mask) == ([12, 13, 14], "causal")
    assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == [0, 3]


def test_transformer_engine_knows_of_padding_between_documents() -> None:
    """Transformer Engine's attention gets the argument by which it knows of padding between
    documents. Padding at the start of a slice belongs to no document of that slice."""
    _, second, third, _ = spans(UNEVEN)
    documents = Documents((3, 2, 2), (2, 6, 1))  # documents with their padding end at 5, 13 and 16
    keys, mask, params = given_to_kernel(documents, second)
    assert (keys.flatten().tolist(), mask) == ([*range(7, 12)], "causal")
    assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == [0, 0]
    assert params.cu_seqlens_q_padded.tolist() == params.cu_seqlens_kv_padded.tolist() == [0, 5]
    _, mask, params = given_to_kernel(documents, third)
    assert params.cu_seqlens_q.tolist() == [0, 0, 2]
    assert params.cu_seqlens_q_padded.tolist() == [0, 1, 3]


# --- refusals


@pytest.mark.parametrize(
    ("params", "why"),
    [
        (Documents((4, 8)).params(), r"packed sequences of 16 tokens, and .* from 0 to 12: pack"),
        (Documents((16,)).params(qkv_format="sbhd"), "qkv_format='sbhd': pack sequences as thd"),
        (
            Documents((9, 7)).params(cu_seqlens_q=torch.tensor([0, 9, 16, -1, -1])),
            "cu_seqlens_q=0, 9, 16, -1, -1, .*: give ascending borders",
        ),
        (
            Documents((4, 8), (2, 2)).params(cu_seqlens_q=torch.tensor([0, 7, 14])),
            "cu_seqlens_q=0, 7, 14, cu_seqlens_q_padded=0, 6, 16: give ascending",
        ),
    ],
    ids=["lengths vary", "no thd", "sentinels", "padding is negative"],
)
def test_packs_that_are_refused(params: PackedSeqParams, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_pack(params, SEQUENCE)


def test_packs_on_ranks_that_share_sequences_are_refused() -> None:
    span = spans((8, 8), 0, 2)[1]
    with pytest.raises(ValueError, match="with context parallelism does not go with packed"):
        cut_to_slice({"packed_seq_params": Documents((16,)).params()}, span)
