"""``python -m megatron_ext`` with this project's messages by way of the host, over gloo.

This is for ranks that share a device, if NCCL gives the device to only one rank.
"""

from __future__ import annotations

import sys

from megatron_ext.__main__ import main
from megatron_ext.adapter.step import connections
from tests.gpu.small_stages import HostChannels, HostGroup

connections.Channels = HostChannels  # type: ignore[misc]
connections.PipelineGroup = HostGroup  # type: ignore[misc]
main(sys.argv[1:])
