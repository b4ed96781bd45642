"""When the data-parallel reduction that Megatron starts for a chunk is done."""

from __future__ import annotations

from typing import Any

from megatron_ext.runtime.recording import RecordedReduction


def watch(model: Any, reduction: RecordedReduction) -> None:
    """Tell ``reduction`` when what ``model.start_grad_sync()`` has just begun is done.

    Where a work does not say so itself, that is when Megatron has waited for it. With several
    optimizer instances Megatron keeps no handle, and nothing is known.
    """
    for group in [*model.bucket_groups, *model.expert_parallel_bucket_groups]:
        handle = group.grad_reduce_handle
        if handle is None:
            continue
        works = getattr(handle, "works", [handle])
        if not all(reduction.ends_with(work) for work in works):
            group.grad_reduce_handle = _Awaited(handle, reduction)


class _Awaited:
    """A handle of Megatron's, in whose place it waits."""

    def __init__(self, handle: Any, reduction: RecordedReduction) -> None:
        self._handle = handle
        self._reduction = reduction

    def wait(self) -> None:
        self._handle.wait()
        self._reduction.was_awaited()
