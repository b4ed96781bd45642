"""Megatron's parameters of a packed row, for a row in which answers share their prompts.

Megatron passes one PackedSeqParams object to all layers. Here that object describes the row as one
document; only positions and core attention read that answers attend to prompts elsewhere in the
row.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_ext.features.shared_prompts.runtime.attended import AttendedTokens, tokens_attended_to
from megatron_ext.features.shared_prompts.runtime.rows import SharedRow


@dataclass(frozen=True)
class SharedAttention:
    """Attention of a packed row in which answers share prompts, as tensors on a device.

    Attributes:
        row: the row.
        positions: position of each token in its sequence, int64 [row].
        attended: tokens that the row's segments attend to.
        params: Megatron's parameters of core attention, with a document for each segment.
    """

    row: SharedRow
    positions: Tensor
    attended: AttendedTokens
    params: PackedSeqParams


@dataclass
class SharedPromptParams(PackedSeqParams):
    """Parameters of a packed row in which answers share prompts.

    Megatron's own fields are empty until `for_layers` fills them, so that a model which does not
    know shared prompts cannot run the row.

    Attributes:
        shared: attention of the row.
    """

    shared: SharedAttention | None = field(default=None, repr=False)


def shared_params(row: SharedRow, device: torch.device) -> SharedPromptParams:
    """Return Megatron's parameters of a packed ``row``, on ``device``, without waiting for it."""
    keys = [len(row.attended(segment)) for segment in row.segments]
    queries = [segment.length for segment in row.segments]
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=_ends(queries, device),
        cu_seqlens_kv=_ends(keys, device),
        max_seqlen_q=max(queries),
        max_seqlen_kv=max(keys),
    )
    positions = torch.tensor(row.positions).to(device, non_blocking=True)
    attended = tokens_attended_to(row, device)
    return SharedPromptParams(shared=SharedAttention(row, positions, attended, params))


def for_layers(params: SharedPromptParams) -> SharedPromptParams:
    """Return ``params`` that describe the row with shared prompts to layers as one document.

    Only positions and core attention know the row's segments. The longest document is the longest
    sequence, up to which rotary frequencies are computed.
    """
    assert params.shared is not None
    row = params.shared.row
    ends = _ends([len(row.sources)], params.shared.positions.device)
    of_layers: dict[str, Any] = {
        "qkv_format": "thd",
        "cu_seqlens_q": ends,
        "cu_seqlens_kv": ends,
        "max_seqlen_q": row.longest,
        "max_seqlen_kv": row.longest,
    }
    return replace(params, **of_layers)


def _ends(lengths: list[int], device: torch.device) -> Tensor:
    on_host = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    return on_host.to(device, non_blocking=True)
