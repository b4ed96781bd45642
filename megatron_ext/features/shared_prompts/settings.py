"""Setting ``--pipeline-shared-prompts``. It acts on Megatron's own schedule too, and is refused
with slices of sequences and with activation offload.
"""

from __future__ import annotations

import enum
from typing import Any

from megatron_ext.base.setting import ON_STOCK, FeatureSettings, conflicting, enumerated, flag
from megatron_ext.schedule.problem import Offload


class SharedPrompts(enum.StrEnum):
    """Treatment of prompts that several answers of a microbatch share.

    ``NONE``: a prompt is computed once for each answer. ``EXACT``: it is computed once, with exact
    numbers. ``LOSSES_ONCE``: it is computed once, even if a router's auxiliary losses then count it
    once.
    """

    NONE = "none"
    EXACT = "exact"
    LOSSES_ONCE = "losses-once"


def _check(config: Any) -> None:
    if config.shared_prompts is SharedPrompts.NONE:
        return
    if config.slices > 1:
        raise conflicting(
            config,
            "shared_prompts",
            "slices",
            "prompts that answers share are untested with slices of sequences; drop "
            f"{flag('slices')}",
        )
    if config.activation_offload is not Offload.NONE:
        raise conflicting(
            config,
            "shared_prompts",
            "activation_offload",
            "the tensors that attention saves for its backward pass would stay on the device; "
            f"drop {flag('activation_offload')}",
        )


SHARED_PROMPTS_SETTINGS = FeatureSettings(
    {
        "shared_prompts": ON_STOCK
        | enumerated(
            SharedPrompts,
            help="Prompts that several answers of a microbatch share: none (the default), exact or "
            "losses-once. exact computes each prompt once, if megatron_ext.share_prompts describes "
            "it, and refuses losses that balance experts. With losses-once such losses count a "
            "prompt once. The setting also acts on Megatron's own schedule.",
        )
    },
    _check,
)
