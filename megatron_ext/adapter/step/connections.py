"""Connections of a rank to the other ranks, shared by its steps.

Process groups are costly to make, and NCCL connects on first use, in which ranks could wait for one
another. So all connections are made once, before the first step, in an order that is the same on
all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core.transformer.multi_token_prediction import roll_tensor

from megatron_ext.adapter.gpu_notice import say_unverified
from megatron_ext.adapter.model_parts import shifts_tokens
from megatron_ext.compile.program.graph import channels
from megatron_ext.compile.program.verify import Program
from megatron_ext.config import PipelineConfig
from megatron_ext.runtime.host.host_memory import HostMemory
from megatron_ext.runtime.messages.batched import BatchedTransport, PipelineGroup
from megatron_ext.runtime.messages.channels import Channels
from megatron_ext.runtime.messages.connecting import connecting
from megatron_ext.runtime.messages.nccl import ctas_for
from megatron_ext.runtime.messages.peers import peers
from megatron_ext.runtime.messages.transport import Boundary, Transport, closed
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.stage_io import Messages
from megatron_ext.runtime.store.agreement import listed
from megatron_ext.schedule.problem import P2P


@dataclass(frozen=True, eq=False)
class Connections:
    """Connections of one rank to its peers, from its first step on.

    Attributes:
        p2p: connection for messages between stages.
        recorder: recorder that is notified of every pass and wait.
        device: device of this rank.
        ctas: thread blocks (CTAs) that a communicator may use; None: NCCL decides.
        host_memory: account of the host memory that activations take.
    """

    p2p: Channels | PipelineGroup
    recorder: Recorder
    device: torch.device
    ctas: int | None
    host_memory: HostMemory = field(default_factory=HostMemory)

    def transport(self, program: Program, boundary: Boundary) -> Messages:
        """Return the transport for the messages of one step of ``program``.

        If shapes vary, the first call is collective over the pipeline.
        """
        if isinstance(self.p2p, PipelineGroup):
            assert boundary.shape is not None
            return BatchedTransport(self.p2p, boundary, program, self.recorder)
        if boundary.shape is None:
            self.p2p.connect_hosts()
        return Transport(self.p2p, boundary, program.schedule.placement, self.recorder)


def connect(
    config: PipelineConfig, program: Program, pipeline: dist.ProcessGroup, recorder: Recorder
) -> Connections:
    """Connect the ranks of ``pipeline`` for messages between stages, before the first step.

    ``program`` is that of the first step. Collective over the pipeline.
    """
    device = torch.device(torch.cuda.current_device())
    if dist.get_rank() == 0:
        say_unverified(device, program.problem)
    ctas = ctas_for(program, pipeline, device)
    p2p: Channels | PipelineGroup
    if config.p2p is P2P.BATCHED:
        p2p = peers().pipeline_group(pipeline, device, recorder)
    else:
        p2p = peers().channels(pipeline, channels(program.schedule), device, ctas, recorder)
    return Connections(p2p, recorder, device, ctas)


def refuse_after_failure(recorder: Recorder) -> None:
    """Raise RuntimeError if this rank failed before it was connected to the other ranks."""
    if recorder.has_failed:
        raise closed(recorder.rank)


def refuse_other_pipeline(
    config: PipelineConfig, pipeline: dist.ProcessGroup, first: dist.ProcessGroup
) -> None:
    """Raise ValueError if ``pipeline`` has other ranks than ``first``, that of the first step."""
    if pipeline is first:
        return
    ranks, of_first = map(dist.get_process_group_ranks, (pipeline, first))
    if ranks != of_first:
        raise ValueError(
            f"--pipeline-schedule {config.schedule}: a model's pipeline has {listed(ranks)}, and "
            f"the schedule has connected {listed(of_first)}, the pipeline of the first step: give "
            "all models of a process pipelines of the same ranks, or call Megatron's own pipeline "
            "function by its name for the others"
        )


def connect_token_shifts(
    models: Sequence[torch.nn.Module],
    context_parallel: dist.ProcessGroup,
    recorder: Recorder | None = None,
) -> None:
    """Connect the ranks of ``context_parallel`` for the token shifts of multi-token prediction.

    Forward passes of multi-token prediction shift tokens and labels by one position, and the ranks
    that share a sequence exchange the tokens at their borders. Megatron does so over the default
    group, on which NCCL makes a communicator for two ranks at their first message: within a pass,
    while messages of the pipeline are posted. So one message is exchanged here, where all other
    connections are made.

    All ranks of the group must call this function if the ``models`` have multi-token prediction
    (then those of all ranks have), and in any case if there is a ``recorder``, which notes the
    wait.
    """
    if context_parallel.size() == 1:
        return
    if recorder is not None:
        with connecting(recorder, context_parallel, "of context parallelism"):
            connect_token_shifts(models, context_parallel)
    elif any(map(shifts_tokens, models)):
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=torch.cuda.current_device())
        roll_tensor(tokens, cp_group=context_parallel)
