"""Completion times of the data-parallel reductions that Megatron starts for a chunk."""

from __future__ import annotations

from typing import Any

from megatron_ext.runtime.recording import RecordedReduction


def watch(model: Any, reduction: RecordedReduction) -> None:
    """Notify ``reduction`` when the reduction just started by ``model.start_grad_sync()``
    completes.

    If a work does not signal completion, the time is that at which Megatron's wait for it returned.
    With several optimizer instances Megatron stores no handle, and the time stays unknown.
    """
    for group in [*model.bucket_groups, *model.expert_parallel_bucket_groups]:
        handle = group.grad_reduce_handle
        if handle is None:
            continue
        works = getattr(handle, "works", [handle])
        if not all(reduction.ends_with(work) for work in works):
            group.grad_reduce_handle = _Awaited(handle, reduction)


class _Awaited:
    """Wrapper of a handle that Megatron waits for."""

    def __init__(self, handle: Any, reduction: RecordedReduction) -> None:
        self._handle = handle
        self._reduction = reduction

    def wait(self) -> None:
        self._handle.wait()
        self._reduction.was_awaited()
