"""Slices of packs: rows of several documents, each of which attends to itself alone.

A slice begins and ends anywhere in a pack. Only its first document can have begun before it, so the
slice attends to one part of the pack, from that document's begin to the slice's end:

    documents  |-- 0 --|------ 1 ------|-- 2 --|
    queries                [========)
    keys               [============)

Layers see the slice as one document, with rotary frequencies by each token's place in its own. Only
core attention needs the borders.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_ext.runtime.slices.running_slice import Span, running_slice

_FLAG = "--pipeline-slices"
_PACK = "pack"  # key under which the pack of the running microbatch is stored


@dataclass(frozen=True)
class PackedDocuments:
    """Documents of one packed microbatch, a row in which they follow each other.

    Attributes:
        borders: tokens at which the documents begin, and at which the last one ends, its padding
            included. Documents may be empty.
        lengths: number of tokens of each document, without the padding behind it.
    """

    borders: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def longest(self) -> int:
        """Number of tokens of the longest document, its padding included."""
        return max(_differences(self.borders))

    @property
    def has_padding(self) -> bool:
        """Whether there is padding behind a document."""
        return self.lengths != _differences(self.borders)

    def part(self, documents: slice, begin: int, end: int) -> PackedDocuments:
        """Return tokens ``begin`` to ``end`` (exclusive) of ``documents`` as a pack."""
        begins = self.borders[documents]
        borders = (*begins, self.borders[documents.stop])
        return PackedDocuments(
            tuple(min(max(border, begin), end) - begin for border in borders),
            tuple(
                max(min(start + length, end) - max(start, begin), 0)
                for start, length in zip(begins, self.lengths[documents], strict=True)
            ),
        )


@dataclass(frozen=True)
class AttendedPart:
    """Part of a pack that a slice of it attends to, with the borders of its documents.

    Attributes:
        begin: first token of the part; the part ends where the slice ends.
        params: Megatron's parameters of the documents. Borders of queries count from the slice's
            begin, borders of keys from ``begin``.
    """

    begin: int
    params: PackedSeqParams


def read_pack(params: PackedSeqParams, tokens: int) -> PackedDocuments:
    """Return the documents in a packed row of ``tokens``. Waits for the device.

    Raises:
        ValueError: the row has another length, or ``params`` describe no documents in a row.
    """
    if params.qkv_format != "thd":
        raise ValueError(
            f"{_FLAG} requires packed sequences in the format thd, and packed_seq_params have "
            f"qkv_format={params.qkv_format!r}: pack sequences as thd, or drop {_FLAG}"
        )
    ends = tuple(params.cu_seqlens_q.tolist())
    padded = params.cu_seqlens_q_padded
    pack = PackedDocuments(ends if padded is None else tuple(padded.tolist()), _differences(ends))
    spaces = _differences(pack.borders)
    if len(spaces) != len(pack.lengths) or any(
        not 0 <= length <= space for length, space in zip(pack.lengths, spaces, strict=True)
    ):
        raise ValueError(
            f"{_FLAG} requires documents that follow one another in the packed sequence, and "
            f"packed_seq_params have cu_seqlens_q={_shown(ends)}, "
            f"cu_seqlens_q_padded={_shown(pack.borders)}: give ascending borders, the same number "
            "in each of the two"
        )
    if (pack.borders[0], pack.borders[-1]) != (0, tokens):
        raise ValueError(
            f"{_FLAG} cuts packed sequences of {tokens} tokens, and the documents of a microbatch "
            f"reach from {pack.borders[0]} to {pack.borders[-1]}: pack to the same length "
            f"everywhere, with padding as part of a document, or drop {_FLAG}"
        )
    return pack


def as_one_document(params: PackedSeqParams, span: Span) -> PackedSeqParams:
    """Return ``params`` changed so that layers treat the slice ``span`` of a packed row as one
    document.

    The row's documents are stored for `attended_part` and `places_in_documents`. The longest
    document stays that of the row: rotary frequencies are computed up to its length.

    Raises:
        ValueError: as `read_pack`.
    """
    running_slice.kept(_PACK, lambda: (read_pack(params, span.length), params))
    borders = _on_device([0, span.end - span.begin], params)
    return replace(
        params,
        cu_seqlens_q=borders,
        cu_seqlens_kv=borders,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
    )


def longest_document() -> int:
    """Return the number of tokens of the longest document in the running microbatch's row."""
    pack, _ = _running_pack()
    return pack.longest


def places_in_documents(span: Span) -> Tensor:
    """Return the place of each token of the slice ``span`` in its own document: int64 [tokens]."""
    return running_slice.kept((_PACK, "places", span), partial(_places, span, *_running_pack()))


def attended_part(span: Span) -> AttendedPart:
    """Return the part of the packed row that the running slice ``span`` attends to."""
    return running_slice.kept((_PACK, "attended", span), partial(_attended, span, *_running_pack()))


def _running_pack() -> tuple[PackedDocuments, PackedSeqParams]:
    return running_slice.kept(_PACK, _no_pack)


def _no_pack() -> Any:
    raise AssertionError("the running microbatch has no packed documents")


def _places(span: Span, pack: PackedDocuments, params: PackedSeqParams) -> Tensor:
    borders = _on_device(pack.borders, params)
    tokens = torch.arange(span.begin, span.end, dtype=borders.dtype, device=borders.device)
    document = torch.searchsorted(borders, tokens, right=True) - 1
    return (tokens - borders[document]).long()


def _attended(span: Span, pack: PackedDocuments, params: PackedSeqParams) -> AttendedPart:
    first = bisect_right(pack.borders, span.begin) - 1
    documents = slice(first, bisect_left(pack.borders, span.end))
    begin = pack.borders[first]
    # If the slice begins in the padding behind a document, it attends to no token of that document.
    if begin + pack.lengths[first] <= span.begin:
        begin = span.begin
    queries, keys = (pack.part(documents, start, span.end) for start in (span.begin, begin))
    ends = (_on_device(_ends(part.lengths), params) for part in (queries, keys))
    borders: Iterable[Tensor | None] = (None, None)
    if pack.has_padding:
        borders = (_on_device(part.borders, params) for part in (queries, keys))
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    of_part = dict(zip(names, (*ends, *borders), strict=True))
    return AttendedPart(
        begin,
        replace(params, **of_part, max_seqlen_q=queries.longest, max_seqlen_kv=keys.longest),
    )


def _ends(lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(itertools.accumulate(lengths, initial=0))


def _differences(borders: Sequence[int]) -> tuple[int, ...]:
    return tuple(end - begin for begin, end in itertools.pairwise(borders))


def _on_device(numbers: Sequence[int], params: PackedSeqParams) -> Tensor:
    """Return ``numbers`` as int32 on the device of the borders in ``params``, without waiting."""
    on_host = torch.tensor(numbers, dtype=torch.int32)
    return on_host.to(params.cu_seqlens_q.device, non_blocking=True)


def _shown(borders: Sequence[int]) -> str:
    """Return ``borders`` as text; of many only the first four and the last three."""
    listed = [*map(str, borders)]
    return ", ".join(listed if len(listed) <= 8 else [*listed[:4], "...", *listed[-3:]])
