"""Packed sequences on the CPU.

Attention over several sequences in a row is Transformer Engine's, on GPUs. Here Megatron's own goes
over one after the other. `--sft` reads conversations with a package and a tokenizer that are not
here: some of made-up tokens stand in.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from random import Random
from typing import Any
from unittest import mock

import torch
from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tokenizers.text.text_tokenizer import MegatronTokenizerText
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.training.datasets import sft_dataset
from torch import Tensor

TOKENS = range(1, 60)  # of conversations; 0 is padding
Message = dict[str, str]


@contextlib.contextmanager
def packed_on_the_cpu() -> Iterator[None]:
    """Megatron trains on packed sequences here, and so do ranks that are forked within."""
    attention = by_sequence(DotProductAttention.forward)
    with (
        mock.patch.object(DotProductAttention, "forward", attention),
        mock.patch.object(sft_dataset, "SFTLowLevelDataset", Conversations),
        mock.patch.object(MegatronTokenizerText, "tokenize_conversation", tokenize_conversation),
        mock.patch.object(MockGPTLowLevelDataset, "max_sequence_length", 8),  # some in a sample
    ):
        yield


def packed_params(lengths: list[int], padding: list[int] | None = None) -> PackedSeqParams:
    """Of sequences of these lengths, in tokens, and of as much ``padding`` behind each."""
    ends = _ends(lengths)
    padded = None if padding is None else _ends([*map(sum, zip(lengths, padding, strict=True))])
    longest = max(lengths)
    return PackedSeqParams("thd", ends, ends, padded, padded, longest, longest)


def _ends(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def by_sequence(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``attention``, over [t, heads, channels] sequence by sequence where they are packed."""

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


class Conversations:
    """In the place of the JSON lines that `--sft` reads: short conversations, some to a line."""

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
    """Its tokens, and the same without those that the model is not to learn."""
    assert return_target and not add_generation_prompt
    tokens: list[int] = []
    targets: list[int] = []
    for message in conversation:
        words = [int(word) for word in message["content"].split()]
        is_learned = message["role"] == "assistant"
        tokens += words
        targets += words if is_learned else [sft_dataset.IGNORE_INDEX] * len(words)
    return torch.tensor(tokens), torch.tensor(targets)
