"""Reductions of gradients as a trace times them: by the handle that Megatron stores.

Nothing is patched. A trace of our schedules waits for the handle instead of Megatron, and relies on
the function that stores it.
"""

from __future__ import annotations

from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, expect


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return expectations of Megatron's gradient reductions, on which a trace relies."""
    return (
        expect(
            "megatron.core.distributed.param_and_grad_buffer:"
            "_ParamAndGradBucketGroup.start_grad_sync",
            reason="a trace times a reduction by the handle that this function stores",
            digests={"0.18": "9be2e10242ba", "0.19, 0.20": "e907e263929d"},
        ),
    )
