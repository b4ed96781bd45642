"""Call of one of Megatron's schedule functions, and what is refused in such a call.

Megatron's schedule functions take a dozen arguments, some of which only their own order of passes
can honour. All are read into one `Call`, from which the rest of the step takes them. An argument
that our step does not honour is refused with its reason, never ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import (
    MultiModuleProcessGroupCollection,
    ProcessGroupCollection,
)

from megatron_ext.adapter.compatibility import refuse
from megatron_ext.adapter.layers import depths_of_stages, refuse_prediction_on_first_rank
from megatron_ext.adapter.step.model_stage import StepCall
from megatron_ext.base.words import counted
from megatron_ext.config import PipelineConfig, flag
from megatron_ext.runtime.messages.transport import Boundary
from megatron_ext.schedule.limit import parse_limit
from megatron_ext.schedule.problem import P2P


@dataclass(frozen=True)
class Call(StepCall):
    """Call of Megatron's pipeline schedule functions on one rank.

    Attributes:
        config: Megatron's config of the model.
        models: the chunks of this rank, by stage.
        iterators: data iterators, one per chunk.
        pipeline: the pipeline's group.
        groups: Megatron's collection of all other groups.
        has_own_communicator: whether the caller gave a p2p_communicator.
    """

    config: Any
    models: list[torch.nn.Module]
    iterators: list[Any]
    seq_length: int
    micro_batch_size: int
    decoder_seq_length: int | None
    pipeline: dist.ProcessGroup
    groups: Any
    has_own_communicator: bool = False

    @property
    def varies_by(self) -> str | None:
        """Settings because of which message shapes are not known in advance; None if known.

        With several chunks per rank Megatron uses ``seq_length`` and ignores
        ``decoder_seq_length``; with one chunk it uses ``decoder_seq_length``. If they differ, the
        caller may mean either.
        """
        if self.config.variable_seq_lengths:
            return "variable_seq_lengths"
        if len(self.models) > 1 and self.decoder_seq_length not in (None, self.seq_length):
            return f"seq_length={self.seq_length}, decoder_seq_length={self.decoder_seq_length}"
        return None

    @property
    def tokens_shape(self) -> tuple[int, int]:
        """Shape [b, s] of a microbatch's tokens on this rank.

        Context-parallel ranks each have a share of s.
        """
        return self.micro_batch_size, self.seq_length // self.context_parallel_size

    def boundary(self) -> Boundary:
        """Return the shape and type of the tensor that passes between stages.

        If the shape varies, it is the largest. After a multi-token prediction layer the tensor also
        has the hidden states of that layer and all earlier ones.
        """
        shapes = schedules.get_tensor_shapes(
            seq_length=self.seq_length,
            micro_batch_size=self.micro_batch_size,
            decoder_seq_length=self.decoder_seq_length,
            config=self.config,
            tp_group=self.groups.tp,
            cp_group=self.groups.cp,
        )
        states: tuple[int, ...] = ()
        if getattr(self.config, "mtp_standalone", False):
            depths = depths_of_stages(self.config)
            assert depths is not None, "only a layout has multi-token prediction elsewhere"
            states = tuple(1 + depths for depths in accumulate(depths))
        return Boundary(tuple(shapes[0]), self.config.pipeline_dtype, states=states)


def refuse_call(
    ours: PipelineConfig,
    config: Any,
    adjust_tensor_shapes_fn: Any,
    p2p_communicator: P2PCommunicator | None,
    pg_collection: Any,
) -> None:
    """Raise ValueError for the first argument or setting that conflicts with ``ours``.

    ``ours`` are the settings of megatron_ext, ``config`` is Megatron's, and the other arguments are
    those of a call of Megatron's schedule function.
    """
    for resolved in ours.resolved_specs:
        refuse(config, resolved, ours.options)
    if adjust_tensor_shapes_fn is not None:
        raise ValueError(
            f"adjust_tensor_shapes_fn is not supported by --pipeline-schedule {ours.schedule}: the "
            "schedule sends one tensor between stages; drop --pipeline-schedule"
        )
    if isinstance(pg_collection, MultiModuleProcessGroupCollection):
        raise ValueError(
            f"--pipeline-schedule {ours.schedule} runs a single model, and pg_collection has the "
            f"process groups of several ({type(pg_collection).__name__}); drop --pipeline-schedule"
        )
    if (p2p_communicator is None) != (pg_collection is None):
        raise ValueError("Provide both p2p_communicator and pg_collection, or neither")


def refuse_chunks(ours: PipelineConfig, call: Call) -> None:
    """Raise ValueError unless a call has a chunk and a data iterator for each stage of this rank.

    Also raised if multi-token prediction is on a stage where Megatron cannot have it.
    """
    resolved = ours.resolved_spec
    placement = resolved.place(call.pipeline.size())
    refuse_prediction_on_first_rank(call.config, placement)
    chunks = placement.chunks
    if len(call.models) != chunks:
        raise ValueError(
            f"--pipeline-schedule {resolved.spec} puts {counted(chunks, 'stage')} on each rank, "
            "and Megatron's pipeline function was called with "
            f"{counted(len(call.models), 'model chunk')}: build as many model chunks as "
            "config.virtual_pipeline_model_parallel_size says"
        )
    if len(call.iterators) != chunks:
        raise ValueError(
            f"Megatron's pipeline function was called with {counted(chunks, 'model chunk')} and "
            f"{counted(len(call.iterators), 'data iterator')}: give each chunk a data iterator of "
            "its own"
        )


def refuse_shapes(ours: PipelineConfig, call: Call) -> None:
    """Raise ValueError if message shapes vary, but our settings ``ours`` require a fixed shape."""
    if call.varies_by is None:
        return
    if _limit_needs_unknown_bytes(ours, call):
        raise ValueError(
            f"--pipeline-memory-limit {ours.memory_limit} is in bytes, and the bytes of a "
            f"microbatch are not known, since the caller passes seq_length={call.seq_length}, "
            f"micro_batch_size={call.micro_batch_size} in place of real lengths: write the limit "
            "as a share of 1F1B's microbatches, such as 0.5x"
        )
    if ours.p2p is P2P.BATCHED:
        raise ValueError(
            f"--pipeline-p2p batched does not go with {call.varies_by}: a batch of messages needs "
            "all their shapes in advance, and with varying lengths each shape arrives in a "
            "message of its own; drop --pipeline-p2p"
        )


def refuse_varying_shapes(call: Call, option: str) -> None:
    """Raise ValueError if message shapes vary, but the feature of ``option`` needs one shape."""
    if call.varies_by is not None:
        raise ValueError(
            f"{flag(option)} does not go with {call.varies_by}: the messages that this option "
            "adds need one fixed shape; give all microbatches the same sequence length"
        )


def _limit_needs_unknown_bytes(ours: PipelineConfig, call: Call) -> bool:
    """Return whether the memory limit is in bytes, but the bytes of a microbatch are not known.

    A caller such as verl gives a size of one token instead of real lengths.
    """
    if ours.memory_limit is None or not ours.costs.is_estimate:
        return False
    limit = parse_limit(ours.memory_limit, call.pipeline.size(), call.num_microbatches)
    return limit.bytes is not None and call.seq_length * call.micro_batch_size == 1


def groups_of(
    p2p_communicator: P2PCommunicator | None, pg_collection: Any
) -> tuple[dist.ProcessGroup, Any]:
    """Return the pipeline's process group and the collection of all other groups.

    They are the caller's, or Megatron's defaults if the caller gives none.
    """
    if p2p_communicator is not None:
        return p2p_communicator.pp_group, pg_collection
    # Megatron 0.18 lacks `_build_default_pg_collection`, so a collection of all groups of
    # parallel_state replaces it.
    all_groups = ProcessGroupCollection.use_mpu_process_groups
    groups = getattr(schedules, "_build_default_pg_collection", all_groups)()
    return parallel_state.get_pipeline_model_parallel_group(), groups
