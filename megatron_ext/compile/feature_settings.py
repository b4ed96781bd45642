"""Settings of the features that a folder holds whole, which `PipelineConfig` has as fields."""

from __future__ import annotations

from megatron_ext.base.setting import FeatureSettings
from megatron_ext.features.metrics.settings import METRICS_SETTINGS
from megatron_ext.features.profile.settings import PROFILE_SETTINGS
from megatron_ext.features.race.settings import RACE_SETTINGS
from megatron_ext.features.split_report.settings import SPLIT_REPORT_SETTINGS
from megatron_ext.features.trace.settings import TRACE_SETTINGS

# In the order in which their conflicts are looked for.
FEATURES: tuple[FeatureSettings, ...] = (
    SPLIT_REPORT_SETTINGS,
    METRICS_SETTINGS,
    TRACE_SETTINGS,
    PROFILE_SETTINGS,
    RACE_SETTINGS,
)

DECLARED = {name: metadata for feature in FEATURES for name, metadata in feature.declared.items()}
WATCHING = [name for feature in FEATURES if feature.only_watches for name in feature.declared]
NAMING_SCHEDULES = ["schedule", *(name for name in DECLARED if "names_schedules" in DECLARED[name])]
WATCHING_STOCK = [name for name in WATCHING if "on_stock" in DECLARED[name]]
