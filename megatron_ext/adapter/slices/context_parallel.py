"""Split of batches over context-parallel ranks, for slices.

Megatron gives each rank a piece from the front of a sequence and one from its back, to balance
attention. With slices, the sequence is cut into slices first, and each slice is split over the
ranks contiguously: the queries of a rank's part then end where its visible keys end, as causal
masks require.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.runtime.slices.running_slice import running_slice

_FLAG = "--pipeline-slices"

PACKED = (
    f"{_FLAG} with context parallelism does not go with packed sequences, whose attention "
    f"Transformer Engine divides over ranks in its own way: write --context-parallel-size 1, or "
    f"drop {_FLAG}"
)

# Entries of a batch that do not have one element per token.
_ABOUT_PACKED = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")
_OF_ALL = (*_ABOUT_PACKED, "local_cp_size", "hybrid_cp_group")

# List that is stored for the running microbatch. It gets an entry when `cut_by_slices` splits the
# batch over the context-parallel ranks; if it stays empty, other code has split the batch.
_cuts = partial(running_slice.kept, "cuts of the batch", list[None])


def connect_sharing(ranks: dist.ProcessGroup) -> None:
    """Run one all-gather over ``ranks``, which share sequences by context parallelism.

    NCCL then connects before the first step, and not within a pass while messages are posted.
    Collective over ``ranks``.
    """
    if ranks.size() > 1:
        device = torch.cuda.current_device()
        gathered = torch.zeros(ranks.size(), device=device)
        dist.all_gather_into_tensor(gathered, torch.zeros(1, device=device), group=ranks)


def cut_by_slices(
    original: Callable[..., dict[str, Any]], batch: dict[str, Any], *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """Return this context-parallel rank's parts of all slices of the sequences in ``batch``.

    Wraps get_batch_on_this_cp_rank of Megatron, which runs unchanged if no slice of a sequence is
    running.

    Raises:
        ValueError: sequences are packed, or have another length than the step's.
    """
    spans = running_slice.spans
    if running_slice.span is None or spans[0].ranks == 1:
        return original(batch, *args, **kwargs)
    if any(batch.get(name) is not None for name in _ABOUT_PACKED):
        raise ValueError(PACKED)
    _cuts().append(None)
    for name, tensor in batch.items():
        if tensor is None or name in _OF_ALL:
            continue
        dimension = 2 if name == "attention_mask" else 1
        if tensor.size(dimension) != spans[0].length:
            raise ValueError(
                f"{_FLAG} cuts sequences of {spans[0].length} tokens, and the {name} of a batch "
                f"has {tensor.size(dimension)} tokens: give all microbatches the same sequence "
                f"length, or drop {_FLAG}"
            )
        parts = (
            tensor.narrow(dimension, s.local.begin, s.local.end - s.local.begin) for s in spans
        )
        batch[name] = torch.cat(list(parts), dimension)
    return batch


def refuse_other_cuts(position_ids: Tensor | None) -> None:
    """Raise ValueError unless tokens were cut by `cut_by_slices` for context parallelism.

    Otherwise the training would be silently wrong.
    """
    if not _cuts():
        raise ValueError(
            f"{_FLAG} with context parallelism needs a forward_step_func that cuts its batch with "
            "megatron.core.utils.get_batch_on_this_cp_rank, and this forward_step_func has not "
            f"called that function: call it there, write --context-parallel-size 1, or drop {_FLAG}"
        )
    if position_ids is not None and position_ids.dim() == 3:
        raise ValueError(
            f"{_FLAG} with context parallelism does not go with positions in several dimensions "
            "(mrope): this combination is untested; write --context-parallel-size 1, or drop "
            f"{_FLAG}"
        )
