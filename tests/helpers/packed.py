"""Packed sequences on the CPU.

Attention over several sequences in a row is a kernel of Transformer Engine, on GPUs. This module
runs Megatron's own attention over one sequence after the other; slices need attention with fewer
queries than keys. `--sft` reads conversations with a package and a tokenizer that are not
installed, so made-up tokens stand in.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any
from unittest import mock

import torch
from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset
from megatron.core.models import backends
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tokenizers.text.text_tokenizer import MegatronTokenizerText
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.training.datasets import sft_dataset
from torch import Tensor

from megatron_ext.adapter.slices import known_models
from megatron_ext.adapter.slices.slice_attention import attend_with_transformer_engine
from megatron_ext.features.shared_prompts.adapter import shared_model_call
from megatron_ext.features.shared_prompts.adapter.attention_to_prompts import attend_to_prompts
from megatron_ext.features.shared_prompts.adapter.params import SharedPromptParams
from tests.helpers.latent_attention import Attention

TOKENS = range(1, 60)  # numbers of the tokens in conversations; token 0 is padding
Message = dict[str, str]


@contextlib.contextmanager
def packed_on_the_cpu() -> Iterator[None]:
    """Let Megatron train on packed sequences in this process and in ranks forked within the
    block."""
    attention = by_sequence(DotProductAttention.forward)
    with mock.patch.object(DotProductAttention, "forward", attention), _made_up_conversations():
        yield


@contextlib.contextmanager
def sliced_packs_on_the_cpu() -> Iterator[None]:
    """Let Megatron train on packed sequences with attention that slices call in the same way as
    Transformer Engine's."""
    known = [PackedAttention.forward]
    with (
        mock.patch.object(backends, "DotProductAttention", PackedAttention),
        mock.patch.object(known_models, "_known_attention", lambda: known),
        _made_up_conversations(),
    ):
        yield


@contextlib.contextmanager
def shared_prompts_on_the_cpu() -> Iterator[None]:
    """Let models that are built in the block run packed sequences with Megatron's own attention.
    Rows with shared prompts run as they would with Transformer Engine's attention."""
    known = [AttentionToPrompts.forward]
    with (
        mock.patch.object(backends, "DotProductAttention", AttentionToPrompts),
        mock.patch.object(shared_model_call, "known_attention", lambda: known),
    ):
        yield


@contextlib.contextmanager
def _made_up_conversations() -> Iterator[None]:
    with (
        mock.patch.object(sft_dataset, "SFTLowLevelDataset", Conversations),
        mock.patch.object(MegatronTokenizerText, "tokenize_conversation", tokenize_conversation),
        # Conversations are short, so that a sample has several of them.
        mock.patch.object(MockGPTLowLevelDataset, "max_sequence_length", 8),
    ):
        yield


def packed_params(lengths: Sequence[int], padding: Sequence[int] | None = None) -> PackedSeqParams:
    """Return Megatron's PackedSeqParams for sequences of these ``lengths`` in tokens, each followed
    by as many tokens of ``padding``."""
    ends = _ends(lengths)
    padded = None if padding is None else _ends([*map(sum, zip(lengths, padding, strict=True))])
    longest = max(lengths)
    return PackedSeqParams("thd", ends, ends, padded, padded, longest, longest)


def _ends(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def by_sequence(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``attention`` that runs over packed sequences, [t, heads, channels], one by one."""

    def forward(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        packed = packed_seq_params
        if packed is None:
            return attention(
                module, query, key, value, attention_mask, attn_mask_type, attention_bias
            )
        padded = packed.cu_seqlens_q_padded
        ends = (packed.cu_seqlens_q if padded is None else padded).tolist()
        assert ends[-1] == len(query), f"sequences end at {ends}, of {len(query)} tokens"
        parts = [
            attention(module, *(part[a:b].unsqueeze(1) for part in (query, key, value)), None)
            for a, b in itertools.pairwise(ends)
            if a < b
        ]
        return torch.cat(parts)

    return forward


def by_segment(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``attention`` that also runs over rows with shared prompts."""

    def forward(module: Any, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(kwargs.get("packed_seq_params"), SharedPromptParams):
            return attend_to_prompts(by_document, module, *args, **kwargs)
        return attention(module, *args, **kwargs)

    return forward


class PackedAttention(Attention):
    """Core attention that has the arguments of Transformer Engine's, and runs over documents one by
    one."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        return attend_with_transformer_engine(
            by_document,
            self,
            query,
            key,
            value,
            attention_mask,
            attn_mask_type,
            attention_bias,
            packed_seq_params,
        )


class AttentionToPrompts(Attention):
    """Core attention of separate sequences, and of rows with shared prompts, which are passed to it
    as documents."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        given = query, key, value, attention_mask, attn_mask_type, attention_bias
        if packed_seq_params is None:
            output: Tensor = super().forward(*given)
            return output
        return attend_to_prompts(by_document, self, *given, packed_seq_params)


def by_document(
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    attn_mask_type: Any,
    attention_bias: None,
    packed_seq_params: PackedSeqParams,
) -> Tensor:
    """Return the attention of [t, heads, channels] as Transformer Engine computes it.

    The mask of each document is aligned to the top left, unless it is said to be aligned to the
    bottom right. The output for padding is 0.
    """
    packed = packed_seq_params
    assert packed.qkv_format == "thd"
    ends = (packed.cu_seqlens_q, packed.cu_seqlens_q_padded, packed.max_seqlen_q)
    queries = _documents(query, *ends)
    groups = query.size(1) // key.size(1)
    ends = (packed.cu_seqlens_kv, packed.cu_seqlens_kv_padded, packed.max_seqlen_kv)
    keys, values = (_documents(t.repeat_interleave(groups, 1), *ends) for t in (key, value))
    parts = []
    for (q, padding), (k, _), (v, _) in zip(queries, keys, values, strict=True):
        offset = len(k) - len(q) if attn_mask_type.name.endswith("bottom_right") else 0
        visible = torch.ones(len(q), len(k)).tril(offset)
        if (window := layer.scale_mask_softmax.window_size) is not None:
            visible = visible.triu(offset - window[0])
        scores = torch.einsum("qhc,khc->hqk", q, k) * layer.softmax_scale
        weights = scores.masked_fill(visible == 0, -torch.inf).softmax(-1)
        parts += [torch.einsum("hqk,khc->qhc", weights, v), v.new_zeros(padding, *v.shape[1:])]
    return torch.cat(parts).flatten(1)


def _documents(
    tensor: Tensor, ends: Tensor, padded: Tensor | None, longest: int
) -> list[tuple[Tensor, int]]:
    """Return each document in ``tensor``, and the number of padding tokens after it."""
    padded = ends if padded is None else padded
    assert ends.dtype == padded.dtype == torch.int32 and len(ends) == len(padded)
    assert int(padded[-1]) == len(tensor) and int(ends.diff().max()) <= longest
    lengths, spaces = ends.diff().tolist(), padded.diff().tolist()
    parts = tensor.split(spaces)
    return [(p[:n], space - n) for p, n, space in zip(parts, lengths, spaces, strict=True)]


class Conversations:
    """Short conversations, in place of the JSON lines that `--sft` reads."""

    def __init__(self, dataset_path: str | None) -> None:
        pass

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> list[Message]:
        draw = Random(index)
        return [
            {
                "role": role,
                "content": " ".join(map(str, draw.choices(TOKENS, k=draw.randint(1, 4)))),
            }
            for _ in range(draw.randint(1, 4))
            for role in ("system", "user", "assistant")
        ]


def tokenize_conversation(
    tokenizer: Any, conversation: list[Message], return_target: bool, add_generation_prompt: bool
) -> tuple[Tensor, Tensor]:
    """Return the tokens of a conversation, and the targets, in which tokens that the model must not
    learn are replaced."""
    assert return_target and not add_generation_prompt
    tokens: list[int] = []
    targets: list[int] = []
    for message in conversation:
        words = [int(word) for word in message["content"].split()]
        is_learned = message["role"] == "assistant"
        tokens += words
        targets += words if is_learned else [sft_dataset.IGNORE_INDEX] * len(words)
    return torch.tensor(tokens), torch.tensor(targets)
