"""Setting ``--pipeline-report-split``, which only watches a training."""

from __future__ import annotations

from megatron_ext.base.setting import FeatureSettings, switch

SPLIT_REPORT_SETTINGS = FeatureSettings(
    {
        "report_split": switch(
            help="After the first step, print the share of the weight gradients that are computed "
            "in passes of their own (W), for each rank of the pipeline with global rank 0. Also "
            "print which layers compute weight gradients together with input gradients, and why."
        )
    },
    only_watches=True,
)
