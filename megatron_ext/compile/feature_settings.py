"""Settings of the features that a folder holds whole, which `PipelineConfig` has as fields."""

from __future__ import annotations

from megatron_ext.base.setting import FeatureSettings
from megatron_ext.features.split_report.settings import SPLIT_REPORT

FEATURES: tuple[FeatureSettings, ...] = (
    SPLIT_REPORT,
)  # fmt: skip

DECLARED = {name: metadata for feature in FEATURES for name, metadata in feature.declared.items()}
WATCHING = [name for feature in FEATURES if feature.only_watches for name in feature.declared]
