"""Setting ``--pipeline-metrics``. It only watches a training, so it also acts on Megatron's own
schedules."""

from __future__ import annotations

from megatron_ext.base.setting import ON_STOCK, FeatureSettings, switch

METRICS_SETTINGS = FeatureSettings(
    {
        "metrics": ON_STOCK
        | switch(
            help="Log pipeline metrics as often as Megatron logs, also to TensorBoard and W&B: "
            "bubble and step time (each measured and predicted), slowest rank, and peak memory. "
            "They describe the pipeline (data-parallel replica) with the last global rank. The "
            "training never waits for them. Without --pipeline-schedule they describe Megatron's "
            "own step."
        )
    },
    only_watches=True,
)
