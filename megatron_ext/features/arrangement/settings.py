"""Settings by which microbatches are ordered and dealt.

Replicas wait for the one with the longest microbatches, and ranks for the longest microbatch. The
settings say how microbatches are arranged, and what their cost is; they need no schedule of ours.
"""

from __future__ import annotations

from typing import Any

from megatron_ext.base.setting import (
    ON_STOCK,
    FeatureSettings,
    as_path,
    enumerated,
    flag,
    setting,
    switch,
)
from megatron_ext.schedule.dealing import MicrobatchOrder


def _check(config: Any) -> None:
    if config.microbatch_weights is not None and not config.arranges_microbatches:
        raise ValueError(
            f"{flag('microbatch_weights')} {config.microbatch_weights}: the weights have no use, "
            f"since microbatches are neither ordered nor dealt; add {flag('microbatch_order')} "
            "small-ends"
        )


ARRANGEMENT_SETTINGS = FeatureSettings(
    {
        "microbatch_order": ON_STOCK
        | enumerated(
            MicrobatchOrder,
            help="Order of a step's microbatches: arrival (the default), or small-ends (the most "
            "costly microbatches in the middle), which shortens the waits of all schedules, "
            "Megatron's too. The cost of a microbatch is the sum of its documents' squared "
            "lengths. Requires --dataloader-inter-document-masking.",
        ),
        "deal_microbatches": ON_STOCK
        | switch(
            help=(
                "Deal the microbatches of the global batch to data-parallel replicas by their "
                "cost, so that all replicas take about the same time. The number of microbatches "
                "per replica does not change. Requires --dataloader-inter-document-masking."
            )
        ),
        "microbatch_weights": ON_STOCK
        | setting(
            as_path,
            "FILE.npy",
            help="Costs of samples, by which microbatches are ordered and dealt: a numpy array of "
            "positive numbers, indexed as the training data set is. Default: the sum of the "
            "squared lengths of a sample's documents.",
        ),
    },
    _check,
)
