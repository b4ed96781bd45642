"""NCCL settings of our communicators.

Every channel has a communicator, and each takes multiprocessors of the GPU (CTAs). The
communicators get the settings that the user gave to the pipeline's group, and at most so many CTAs
as the rank with the most communicators can afford.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.compile.program.communicators import communicators, ctas_of_each
from megatron_ext.compile.program.verify import Program

# Settings of a communicator that Megatron's --nccl-communicator-config-path accepts.
SETTINGS = ("cga_cluster_size", "max_ctas", "min_ctas", "net_name")


def communicator_options(pipeline: Any, max_ctas: int | None) -> dist.ProcessGroupNCCL.Options:
    """Return new NCCL options with the settings of ``pipeline``, the options of a pipeline's group.

    The settings are the user's configuration of ``pp``, and the priority of its stream.
    ``max_ctas`` limits the CTAs if the configuration does not, but never below the user's minimum.
    Options of another backend (UCC) are ignored.
    """
    options = dist.ProcessGroupNCCL.Options()
    config: Any = options.config
    unset = config.max_ctas
    if isinstance(pipeline, dist.ProcessGroupNCCL.Options):
        options.is_high_priority_stream = pipeline.is_high_priority_stream
        for name in SETTINGS:
            value = getattr(pipeline.config, name)
            if value not in (None, unset):
                setattr(config, name, value)
    if config.max_ctas == unset and max_ctas is not None:
        # NCCL's value for an unset min_ctas is less than any number.
        config.max_ctas = max(max_ctas, config.min_ctas)
    return options


def ctas_for(program: Program, pipeline: dist.ProcessGroup, device: torch.device) -> int | None:
    """Return the number of CTAs that each of our NCCL communicators in ``pipeline`` may use.

    The number is the same on all ranks, as both ends of a channel must use equally many: it is
    computed for the rank with the most communicators under ``program`` on the smallest device. None
    without a GPU, or if ``program`` needs no communicators of ours (batched messages use Megatron's
    group). Collective over ``pipeline``.
    """
    busiest = max(of_rank.total for of_rank in communicators(program))
    if device.type != "cuda" or not busiest:
        return None
    multiprocessors = [0] * pipeline.size()
    here = torch.cuda.get_device_properties(device).multi_processor_count
    dist.all_gather_object(multiprocessors, here, group=pipeline)
    return ctas_of_each(busiest, min(multiprocessors))
