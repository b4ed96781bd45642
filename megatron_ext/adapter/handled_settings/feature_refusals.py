"""Part of a feature that answers before torch is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_ext.config import PipelineConfig


@dataclass(frozen=True)
class FeatureRefusals:
    """Answers of one feature about launches.

    Attributes:
        may_be_on: whether a launch of a config may have the feature, as far as our settings tell.
        name: the name under which doctor lists its patches.
        patches: the modules of patches that only this feature needs, below megatron_ext.patches.
    """

    may_be_on: Callable[[PipelineConfig], bool]
    name: str = ""
    patches: tuple[str, ...] = ()
