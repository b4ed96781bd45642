"""Streams emulated on the CPU, in ranks that are forked while the emulation is on.

The emulation misses:

- The inside of a kernel, and its temporary memory; graph capture; streams of libraries (Transformer
  Engine's, DeepEP's); NCCL's channels, and its batches.
- Operations of threads other than the main one; tensor hooks, which run before the hook that tells
  of their node; reads by the host from a copy that is still on its way. Host and device tensors
  look alike: only offload's buffers are known to be host memory, and `.to("cpu")` copies nothing.
  Code that runs only with a GPU does not run: the metrics' stream, copies of post-validation's
  snapshot to the host, and the host's waits for a pass some passes ago.
- Memory in cycles of references, which is never freed: the garbage collector is off, as the moments
  at which it runs depend on everything that the process has done before.
- The exact time at which the tensors of a collective are freed if gloo has the last reference: a
  thread of gloo frees them a little later than on a GPU. More may be ordered then, so a finding may
  be missed, but none is invented.
- Other orders of the host: accesses that happen to be ordered in this one count as ordered. The
  emulation says nothing about deadlocks; for those see the other modes of
  `tests.helpers.adversary`.

It is stricter than torch in three ways: the next allocation counts, whatever its size; a view with
gaps between its elements counts for all bytes between them; a work of NCCL's that is never waited
for keeps no memory alive. In the code that runs today this has led to no false finding.

Two things have looked like findings, and are no faults: gloo's own operations on tensors, which are
ignored, and reads of a model by tests where Megatron logs, while its parameters are being gathered.
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
from megatron_ext.runtime import parameter_hooks, recording
from megatron_ext.runtime.executor import _Execution
from megatron_ext.runtime.messages import channels
from megatron_ext.schedule.action import Action
from tests.helpers import ranks
from tests.helpers.streams.device import Device, cuda_names, watch_resizes
from tests.helpers.streams.engine import Engine
from tests.helpers.streams.groups import EmulatedGroups
from tests.helpers.streams.host import EmulatedCopies, pageable
from tests.helpers.streams.operations import Operations

# Modules of which some code runs only for tensors of a GPU.
_ASK_FOR_A_GPU = {
    "megatron_ext.adapter.pairs.planned_stage",
    "megatron.core.pipeline_parallel.combined_1f1b",
    "megatron.core.transformer.moe.moe_utils",
}


@contextlib.contextmanager
def emulated_streams(at_least: int, traces: Path | None = None) -> Iterator[None]:
    """Let ranks that are forked within the context run on an emulated device.

    A rank of several fails at its end if there is a finding, or if fewer than ``at_least`` accesses
    crossed streams. A rank that is alone only forks the other ranks. Each rank writes its
    allocations to the folder ``traces``, as a pickled list of `storages.Event` in ``<rank>.pkl``.
    """
    device = Device()
    engine = Engine(device)
    groups = EmulatedGroups(device)
    run, perform = ranks.Request.run, _Execution.perform

    def emulated_run(request: ranks.Request) -> Any:
        if engine.is_watching:  # this rank was forked from a process that is emulated already
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
        # W must not take the emulation's hooks on a parameter's node for a caller's, or it would
        # leave that weight out.
        ours = parameter_hooks._WRAPPERS_HOOK, f"{Engine._hook.__qualname__}."
        patch.setattr(parameter_hooks, "_WRAPPERS_HOOK", ours)
        yield


def _replace_torch(patch: pytest.MonkeyPatch, device: Device, groups: EmulatedGroups) -> None:
    """Let torch, and the platform without a GPU, give their work to ``device``."""
    names = cuda_names(device)
    for name, meaning in names.items():
        patch.setattr(torch.cuda, name, meaning)
    _replace_platform(patch, device, names)
    # Measured costs decide which programs run. A clock that counts makes them equal in each run.
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
    """Let the platform without a GPU use ``names`` of torch.cuda, and not replace
    `record_stream`."""
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
        if isinstance(tensor, Tensor):  # the CPU makes no copy here; on a GPU there is one
            stream = device.current
            time = device.clocks.launch(stream)
            device.storages.access(tensor, stream, time, "a copy to the host", writes=False)
        return on_host(original, tensor, as_numpy, **kwargs)

    patch.setattr(torch.Tensor, "record_stream", record_stream)
    patch.setattr(cpu, "_on_host", moved_to_host)


def _is_cuda(tensor: Tensor) -> bool:
    return sys._getframe(1).f_globals.get("__name__") in _ASK_FOR_A_GPU
