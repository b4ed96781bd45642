"""Facts about a feature that are needed before torch is loaded.

Doctor and the launcher decide which patches a command needs, and must not import torch for that. So
a feature states here, in data alone, when it may be on and which patches are its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_ext.adapter.handled_settings.handled_setting import HandledSetting
from megatron_ext.adapter.handled_settings.refused_setting import RefusalGroup
from megatron_ext.config import PipelineConfig


@dataclass(frozen=True)
class FeatureRefusals:
    """Facts about one feature that are known before torch is imported.

    Attributes:
        may_be_on: whether a launch may have the feature, judged by our settings alone.
        name: the name under which doctor lists its patches.
        patches: the modules of patches that only this feature needs, below megatron_ext.patches.
        groups: Megatron's settings that the feature refuses.
        handled: Megatron's settings that the feature implements.
    """

    may_be_on: Callable[[PipelineConfig], bool]
    name: str = ""
    patches: tuple[str, ...] = ()
    groups: tuple[RefusalGroup, ...] = ()
    handled: tuple[HandledSetting, ...] = ()
