"""NCCL's settings for our communicators."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.schedule.program.communicators import communicators, ctas_of_each
from megatron_ext.schedule.program.verify import Program

# What Megatron's --nccl-communicator-config-path can set.
SETTINGS = ("cga_cluster_size", "max_ctas", "min_ctas", "net_name")


def communicator_options(pipeline: Any, max_ctas: int | None) -> dist.ProcessGroupNCCL.Options:
    """New options with the settings of ``pipeline``, the options of a pipeline's own group: what
    the user's configuration file says of ``pp``, and its stream's priority.

    Where that does not say how many CTAs there may be, ``max_ctas`` does, but never less than the
    user wants at least. Options of another backend (UCC) have nothing to say.
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
        config.max_ctas = max(max_ctas, config.min_ctas)  # unset is less than any number
    return options


def ctas_for(program: Program, pipeline: dist.ProcessGroup, device: torch.device) -> int | None:
    """How many CTAs each communicator of ours may use in ``pipeline``, which runs ``program``.

    The same on all ranks, as both ends of a channel have to use equally many: for the rank with the
    most communicators on the smallest device. None without a GPU, or if ``program`` needs no
    communicators of ours (batched messages go through Megatron's group). Collective over
    ``pipeline``.
    """
    busiest = max(of_rank.total for of_rank in communicators(program))
    if device.type != "cuda" or not busiest:
        return None
    multiprocessors = [0] * pipeline.size()
    here = torch.cuda.get_device_properties(device).multi_processor_count
    dist.all_gather_object(multiprocessors, here, group=pipeline)
    return ctas_of_each(busiest, min(multiprocessors))
