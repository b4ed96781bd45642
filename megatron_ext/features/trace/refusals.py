"""Condition under which a launch is traced, and the reductions that a trace times."""

from __future__ import annotations

from megatron_ext.adapter.handled_settings.feature_refusals import FeatureRefusals

TRACE_REFUSALS = FeatureRefusals(
    lambda config: config.trace is not None,
    name="reductions of gradients that a trace times",
    patches=("megatron.core.distributed.param_and_grad_buffer.traced_reductions",),
)
