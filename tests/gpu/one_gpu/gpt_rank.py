"""``python -m megatron_ext`` with messages of ours by way of the host, over gloo.

For ranks that share a device which NCCL gives to one rank alone.
"""

from __future__ import annotations

import sys

from megatron_ext.launch import launch
from megatron_ext.patches.megatron.core.pipeline_parallel import schedules
from tests.gpu.small_stages import HostChannels, HostGroup

schedules.Channels = HostChannels  # type: ignore[misc]
schedules.PipelineGroup = HostGroup  # type: ignore[misc]
launch(sys.argv[1:])
