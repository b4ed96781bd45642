"""Setting that requests copies of activations to the host's memory, and what it requires."""

from __future__ import annotations

from typing import Any

from megatron_ext.base.setting import FeatureSettings, enumerated, flag
from megatron_ext.schedule.problem import Offload


def _check(config: Any) -> None:
    method, costs = config.activation_offload, config.costs.text
    if method is Offload.FIT and config.memory_limit is None:
        raise ValueError(
            f"{flag('activation_offload')} {method} copies as many activations to the host as a "
            f"memory limit requires, and there is none: add {flag('memory_limit')}, or write "
            f"{Offload.FULL} or {Offload.HALF}"
        )
    if method is not Offload.NONE and "=" in costs and "d2h=" not in costs:
        raise ValueError(
            f"{flag('activation_offload')} {method} needs to know how long copies to the host "
            f"take: add d2h= and h2d= to {flag('costs')} {costs} (seconds per microbatch "
            f"of a rank), or drop {flag('costs')} for an estimate"
        )


OFFLOAD_SETTINGS = FeatureSettings(
    {
        "activation_offload": enumerated(
            Offload,
            help="Activations to copy to host memory until they are needed: none (the default), "
            "half, full or fit. half copies those of the longer-lived half of a rank's chunks, "
            "full all that the host link carries without delaying a pass, and fit as few as meet "
            "--pipeline-memory-limit.",
        )
    },
    _check,
)
