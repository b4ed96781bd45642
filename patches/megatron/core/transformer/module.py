"""Removal of the settings that the schedule implements from a model's config, before layers are
built.

A caller without Megatron's arguments may set them in the config until the model is built. The
constructor patched here runs before that of every other module of the model.

Not patched: the config's own checks, which run earlier.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ext.adapter.handled_settings.settings import apply_handled_settings
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap


def patches(ours: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch that removes settings whose work the schedule does from a model's config."""

    def without_what_is_ours(original: Callable[..., None], module: Any, config: Any) -> None:
        apply_handled_settings(config, ours)
        original(module, config)

    return (
        wrap(
            "megatron.core.transformer.module:MegatronModule.__init__",
            without_what_is_ours,
            reason="modules must not see the settings whose work the schedule does itself",
            signature="(self, config)",
        ),
    )
