"""Installation of a configuration into a running process.

Patches must be in force before anything of Megatron that they change is used: a model that exists,
or a function that somebody holds, would keep the old behaviour. `install` refuses to come too late,
and applies either all patches or none.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

from megatron_ext.base.logger import logger
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Handle, Patch, PatchError, apply, stale_references
from megatron_ext.patches.features import needed_patches

_installed: tuple[PipelineConfig, Handle] | None = None


def install(config: PipelineConfig) -> Handle:
    """Apply the patches that ``config`` needs, and return their handle.

    If an equal configuration is in force, its handle is returned: a launcher and
    `megatron_ext.auto` read the same variables.

    Raises:
        PatchError: another configuration is in force, a model exists already, a patched function is
            referenced where it cannot be replaced, or a patch does not fit. Nothing is changed.
    """
    global _installed
    if _installed is not None and _installed[1].is_in_force:
        if _installed[0] == config:
            return _installed[1]
        raise PatchError(
            f"schedule {_installed[0].schedule} is already installed in this process, with "
            f"settings that differ from those of schedule {config.schedule} now: install once, or "
            "undo the handle of the first installation"
        )
    if config.arranges_microbatches and os.environ.get("RANK", "0") == "0":
        logger.info(
            "microbatches are ordered and dealt where Megatron's own loader reads them, and under "
            "megatron_ext.bridge.use Megatron-Bridge's; batches of other loaders are ordered by "
            "megatron_ext.order_microbatches"
        )
    patches = needed_patches(config)
    problem = _too_late(patches)
    if problem is not None:
        # An exception that nothing refers to may still hold frames that refer to functions to be
        # patched, so garbage is collected first.
        gc.collect()
        problem = _too_late(patches)
    if problem is not None:
        raise PatchError(problem)
    handle = apply(patches)
    _installed = (config, handle)
    return handle


def _too_late(patches: Sequence[Patch]) -> str | None:
    """Return why it is too late to apply ``patches``, with the fix; None if it is not."""
    if (model := _existing_model()) is not None:
        return (
            f"a Megatron model ({model}) has been built already, with stock layers: "
            f"call megatron_ext.install before the model is built"
        )
    if stale := stale_references(patches):
        return (
            "install would not reach everything:\n  "
            + "\n  ".join(stale)
            + "\ncall megatron_ext.install before these references are taken"
        )
    return None


def _existing_model() -> str | None:
    """Return the class name of a living Megatron module; None if there is none."""
    module = sys.modules.get("megatron.core.transformer.module")
    if module is None:
        return None
    for candidate in gc.get_objects():
        # `type` is compared, since isinstance may run code of the object.
        if issubclass(type(candidate), module.MegatronModule):
            return type(candidate).__name__
    return None
