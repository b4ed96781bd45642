"""Microbatches of Megatron-Bridge in another order than that of arrival, dealt by their cost.

Bridge is patched only if its loaders have been imported, which `megatron_ext.bridge.use` does.

Not patched: the samplers; loaders of validation and test data. `use` refuses configs whose
microbatches cost the same or have other loaders.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from megatron_ext.config import PipelineConfig
from megatron_ext.features.arrangement.adapter.arranged_batches import arrange_loader
from megatron_ext.patches.engine import Patch, wrap

MODULE = "megatron.bridge.data.loaders"


def import_loaders() -> None:
    """Import Megatron-Bridge's module of data loaders, so that its functions can be patched."""
    importlib.import_module(MODULE)


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch that orders training batches by cost; none without Megatron-Bridge."""
    if MODULE not in sys.modules:
        return ()

    def build(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
        training, *others = original(*args, **named)
        if training is not None:
            arrange_loader(training, training.dataset, config)
        return training, *others

    return (
        wrap(
            f"{MODULE}:build_train_valid_test_data_loaders",
            build,
            reason="order microbatches by their cost, and deal them to data-parallel replicas",
            signature=(
                "(cfg, train_state, build_train_valid_test_datasets_provider, dp_group, *, "
                "eval_dp_group=None)"
            ),
        ),
    )
