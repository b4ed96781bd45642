"""A platform without a GPU in verl's registry of platforms; verl imports it before it looks for
one."""

from __future__ import annotations

from typing import Any

import torch
from verl.plugin.platform import PlatformRegistry
from verl.plugin.platform.platform_cuda import PlatformCUDA


class _Device:
    """torch.cuda as the CPU platform of this project replaces it, and the few values of a device
    that verl reads."""

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def mem_get_info() -> tuple[int, int]:
        return 0, 0

    @staticmethod
    def get_device_name() -> str:
        return "CPU"

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


@PlatformRegistry.register(platform="cpu")
class _Platform(PlatformCUDA):
    device_name = "cpu"
    device_module = _Device()

    def is_available(self) -> bool:
        return True
