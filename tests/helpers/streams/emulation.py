"""Streams emulated on the CPU, in ranks that are forked meanwhile.

What it misses:

- What a kernel does inside, and the temporary memory of one; graph capture; streams of libraries
  (Transformer Engine's, DeepEP's); NCCL's channels, and what it batches.
- Operations of other threads than the main one; tensor hooks, which run before the hook that tells
  of their node; what the host reads of a copy that is on its way to it. Host and device tensors
  look alike here: only offload's buffers are known for host memory, and `.to("cpu")` copies
  nothing. What is done on a GPU alone does not run: the metrics' stream, copies of
  post-validation's snapshot to the host, the host's waits for a pass some passes ago.
- Memory in cycles of references is never given back: the garbage collector is off, as its moments
  depend on all that the process has done before.
- Tensors of a collective that gloo is the last to refer to are given back by a thread of gloo's,
  somewhat later than on a GPU. More may be ordered then: a finding may be missed, none is invented.
- It follows one order of the host, in which what happens to be ordered counts as ordered. It says
  nothing of deadlocks: for those see the other modes of `tests.helpers.adversary`.

What it takes more strictly than torch: the next allocation counts, whatever its size; a view whose
elements lie apart counts for all bytes between them; a work of NCCL's that is never waited for
keeps no memory. In what runs today that has found nothing which is not one.

What has looked like a finding, and is none: gloo's own operations on tensors, which are ignored;
and what tests read of a model where Megatron logs, while its parameters are gathered.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import pickle
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from megatron_ext.features.offload.runtime import buffers, offload
from megatron_ext.features.post_validation.runtime import messages as verdicts
from megatron_ext.patches import cpu
from megatron_ext.runtime import recording
from megatron_ext.runtime.executor import _Execution
from megatron_ext.runtime.messages import channels
from megatron_ext.schedule.action import Action
from tests.helpers import ranks
from tests.helpers.streams.device import Device, cuda_names, watch_resizes
from tests.helpers.streams.engine import Engine
from tests.helpers.streams.groups import EmulatedGroups
from tests.helpers.streams.host import EmulatedCopies, pageable
from tests.helpers.streams.operations import Operations

# Modules that do something for tensors of a GPU alone.
_ASK_FOR_A_GPU = {
    "megatron_ext.adapter.pairs.planned_stage",
    "megatron.core.pipeline_parallel.combined_1f1b",
    "megatron.core.transformer.moe.moe_utils",
}


@contextlib.contextmanager
def emulated_streams(at_least: int, traces: Path | None = None) -> Iterator[None]:
    """Have ranks that are forked meanwhile run on an emulated device.

    A rank of several fails in the end if something was found, and if fewer than ``at_least``
    accesses crossed streams; one that is alone is the world that others run in. Into the folder
    ``traces`` each rank writes its allocations, a pickled list of `storages.Event`, as
    ``<rank>.pkl``.
    """
    device = Device()
    engine = Engine(device)
    groups = EmulatedGroups(device)
    run, perform = ranks.Request.run, _Execution.perform

    def emulated_run(request: ranks.Request) -> Any:
        if engine.is_watching:  # a rank that was forked from another one
            value = run(request)
        else:
            device.storages.trace = None if traces is None else []
            gc.disable()
            with Operations(device, engine, groups), engine.watching():
                value = run(request)
        if request.ranks > 1:
            if traces is not None:
                trace = pickle.dumps(device.storages.trace)
                (traces / f"{request.rank}.pkl").write_bytes(trace)
            device.findings.check(at_least)
        return value

    def noted_perform(execution: _Execution, action: Action) -> None:
        device.storages.mark(str(action))
        try:
            perform(execution, action)
        finally:
            device.storages.mark("")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks.Request, "run", emulated_run)
        patch.setattr(_Execution, "perform", noted_perform)
        _replace_torch(patch, device, groups)
        patch.setattr(offload, "copies_on", partial(EmulatedCopies, device))
        patch.setattr(buffers, "whole_pages", partial(pageable, device))
        yield


def _replace_torch(patch: pytest.MonkeyPatch, device: Device, groups: EmulatedGroups) -> None:
    """Have torch, and the platform without a GPU, give their work to ``device``."""
    names = cuda_names(device)
    for name, meaning in names.items():
        patch.setattr(torch.cuda, name, meaning)
    _replace_platform(patch, device, names)
    # Measured costs decide about programs: by a clock that counts, these are the same in each run.
    count = itertools.count()
    patch.setattr(recording.HostClock, "record_event", lambda clock: float(next(count)))
    patch.setattr(torch.UntypedStorage, "resize_", watch_resizes(device))
    patch.setattr(torch.Tensor, "is_cuda", property(_is_cuda), raising=False)
    for name, method in groups.methods().items():
        patch.setattr(dist.ProcessGroup, name, method)
    abort = distributed_c10d._abort_process_group
    patch.setattr(distributed_c10d, "_abort_process_group", groups.ending(abort))
    for module in (channels, verdicts):
        patch.setattr(module, "make_groups", groups.made_for_hosts(module.make_groups))


def _replace_platform(patch: pytest.MonkeyPatch, device: Device, names: dict[str, Any]) -> None:
    """Have the platform without a GPU take ``names`` of torch.cuda, and keep `record_stream`."""
    cuda_names_of_cpu, patches, on_host = cpu._cuda_names, cpu.patches, cpu._on_host
    patch.setattr(cpu, "_cuda_names", lambda: cuda_names_of_cpu() | names)
    patch.setattr(
        cpu,
        "patches",
        lambda: tuple(p for p in patches() if p.target != "torch:Tensor.record_stream"),
    )

    def record_stream(tensor: Tensor, stream: Any) -> None:
        device.record_stream(tensor, stream)

    def moved_to_host(original: Any, tensor: Any, as_numpy: bool = False, **kwargs: Any) -> Any:
        if isinstance(tensor, Tensor):  # a copy, which the CPU leaves out
            stream = device.current
            time = device.clocks.launch(stream)
            device.storages.access(tensor, stream, time, "a copy to the host", writes=False)
        return on_host(original, tensor, as_numpy, **kwargs)

    patch.setattr(torch.Tensor, "record_stream", record_stream)
    patch.setattr(cpu, "_on_host", moved_to_host)


def _is_cuda(tensor: Tensor) -> bool:
    return sys._getframe(1).f_globals.get("__name__") in _ASK_FOR_A_GPU
