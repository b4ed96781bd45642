"""Settings of the features that have a folder of their own; `PipelineConfig` has them as fields.

The config declares its fields from this table, so that a feature's settings are written in its own
folder.
"""

from __future__ import annotations

from dataclasses import fields

from megatron_ext.base.setting import FeatureSettings
from megatron_ext.features.arrangement.settings import ARRANGEMENT_SETTINGS
from megatron_ext.features.metrics.settings import METRICS_SETTINGS
from megatron_ext.features.offload.settings import OFFLOAD_SETTINGS
from megatron_ext.features.post_validation.settings import POST_VALIDATION_SETTINGS
from megatron_ext.features.profile.settings import PROFILE_SETTINGS
from megatron_ext.features.race.settings import RACE_SETTINGS
from megatron_ext.features.shared_prompts.settings import (
    SHARED_PROMPTS_SETTINGS,
)
from megatron_ext.features.shared_prompts.settings import (
    SharedPrompts as SharedPrompts,
)
from megatron_ext.features.split_report.settings import SPLIT_REPORT_SETTINGS
from megatron_ext.features.trace.settings import TRACE_SETTINGS
from megatron_ext.features.vocabulary.settings import VOCABULARY_SETTINGS
from megatron_ext.schedule.problem import ScheduleOptions

# Features with settings, in the order in which conflicts of their settings are checked.
FEATURES: tuple[FeatureSettings, ...] = (
    SPLIT_REPORT_SETTINGS,
    METRICS_SETTINGS,
    TRACE_SETTINGS,
    ARRANGEMENT_SETTINGS,
    VOCABULARY_SETTINGS,
    OFFLOAD_SETTINGS,
    POST_VALIDATION_SETTINGS,
    PROFILE_SETTINGS,
    RACE_SETTINGS,
    SHARED_PROMPTS_SETTINGS,
)

DECLARED = {name: metadata for feature in FEATURES for name, metadata in feature.declared.items()}
WATCHING = [name for feature in FEATURES if feature.only_watches for name in feature.declared]
NAMING_SCHEDULES = ["schedule", *(name for name in DECLARED if "names_schedules" in DECLARED[name])]
WATCHING_STOCK = [name for name in WATCHING if "on_stock" in DECLARED[name]]
# Names of settings by the schedule option that they request, if the two names differ.
_SETTING_OF_OPTION = {
    metadata["option"]: name for name, metadata in DECLARED.items() if "option" in metadata
}


def setting_of(option: str) -> str:
    """Return the name of the setting that requests ``option`` of `ScheduleOptions`."""
    return _SETTING_OF_OPTION.get(option, option)


def settings_of_options(options: ScheduleOptions) -> dict[str, str | bool | int]:
    """Return the settings that request ``options``, by name, as users write them. Overlapped passes
    have none: Megatron's flag requests them."""
    slices = options.slices
    settings = {
        setting_of(option.name): getattr(options, option.name)
        for option in fields(options)
        if option.name not in ("slices", "pairs")
    }
    settings |= {
        "slices": slices.count,
        "slice_lengths": slices,
        "join_slice_weights": slices.joined_weights,
    }
    return {
        name: value if isinstance(value, bool | int) else str(value)
        for name, value in settings.items()
    }
