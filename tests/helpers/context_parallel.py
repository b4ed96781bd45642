"""Context parallelism on the CPU: attention over sequences of which each rank has a part.

In Megatron only Transformer Engine's kernels support it. This module gathers the keys and values of
whole sequences over the group and passes them to Megatron's local attention, all with autograd.
Like those kernels it has messages in F and in I. Everything else is Megatron's own.

With --pipeline-slices, this project's code gathers the keys and values of a slice, so there
`LocalAttention` only lets Megatron build its local attention.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import utils
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.common.embeddings import rotary_pos_embedding, yarn_rotary_pos_embedding
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor

from megatron_ext.patches import cpu
from tests.helpers.latent_attention import Attention


def install(patch: pytest.MonkeyPatch, attention: type[DotProductAttention] | None = None) -> None:
    """Let ranks that are forked from now on use context parallelism."""
    attention = attention or DividedAttention
    patch.setattr(LocalSpecProvider, "core_attention", lambda provider: attention)
    patch.delitem(cpu._REFUSED, "--context-parallel-size", raising=False)
    extension = SimpleNamespace(thd_get_partitioned_indices=part_of_packed)
    # ``extension`` stands in for Transformer Engine's module
    patch.setattr(utils, "tex", extension, raising=False)
    # Megatron's own functions pin memory, so they are replaced.
    for module in (rotary_pos_embedding, yarn_rotary_pos_embedding):
        patch.setattr(module, "get_pos_emb_on_this_cp_rank", part_of_positions)


def places(lengths: Sequence[int], rank: int, ranks: int) -> Tensor:
    """Return the positions of the tokens of ``rank`` in concatenated sequences of these
    ``lengths``.

    Each sequence is cut into 2 * ``ranks`` pieces. A rank has one piece from the front and one from
    the back, so that all ranks attend to equally many tokens.
    """
    pieces = []
    for start, length in zip(itertools.accumulate(lengths, initial=0), lengths, strict=False):
        size, rest = divmod(length, 2 * ranks)
        assert not rest, f"a sequence of {length} tokens does not divide over {ranks} ranks"
        for piece in (rank, 2 * ranks - 1 - rank):
            pieces.append(torch.arange(start + piece * size, start + (piece + 1) * size))
    return torch.cat(pieces)


def part_of_positions(embedding: Tensor, dimension: int, group: dist.ProcessGroup) -> Tensor:
    """Stand in for Megatron's get_pos_emb_on_this_cp_rank."""
    own = places([embedding.size(dimension)], group.rank(), group.size())
    return embedding.index_select(dimension, own)


def part_of_packed(ends: Tensor, tokens: int, ranks: int, rank: int) -> Tensor:
    """Stand in for Transformer Engine's thd_get_partitioned_indices."""
    own = places(ends.diff().tolist(), rank, ranks)
    assert len(own) * ranks == tokens, f"the last of {tokens} tokens are in no sequence: {ends}"
    return own


class _Whole(torch.autograd.Function):
    """Gathers all tokens [s, ...] of sequences; each rank of ``group`` gives those at its
    positions."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, lengths: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.lengths, ctx.group = lengths, group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        whole = part.new_empty(sum(lengths), *part.shape[1:])
        for rank, tokens in enumerate(parts):
            whole[places(lengths, rank, group.size())] = tokens
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient[places(ctx.lengths, ctx.group.rank(), ctx.group.size())], None, None


class LocalAttention(Attention):
    """Megatron's local attention, which can be built here although context parallelism is on."""

    def __init__(self, config: Any, *args: Any, pg_collection: Any, **kwargs: Any) -> None:
        undivided = copy.copy(config)
        undivided.context_parallel_size = 1  # Megatron's attention refuses any other size
        super().__init__(undivided, *args, pg_collection=pg_collection, **kwargs)
        self._group = pg_collection.cp


class DividedAttention(LocalAttention):
    """Causal attention within each sequence, from this rank's tokens to all."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the attention of ``query``, ``key`` and ``value``: [s, b, heads, width], or [t,
        heads, width] for packed sequences."""
        group = self._group
        lengths = [key.size(0) * group.size()]
        if packed_seq_params is not None:
            ends = packed_seq_params.cu_seqlens_kv_padded
            ends = packed_seq_params.cu_seqlens_kv if ends is None else ends
            lengths = ends.diff().tolist()
            query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        own, all_places = places(lengths, group.rank(), group.size()), torch.arange(sum(lengths))
        is_hidden = (own[:, None] < all_places) | (sequence[own][:, None] != sequence)
        key, value = (_Whole.apply(tensor, lengths, group) for tensor in (key, value))
        return super().forward(query, key, value, is_hidden[None, None], **kwargs)
