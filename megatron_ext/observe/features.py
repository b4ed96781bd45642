"""Features that remark on launches, in the order of their remarks. Only this table knows all of
them."""

from __future__ import annotations

from megatron_ext.features.race.report import race_remarks
from megatron_ext.features.trace.report import trace_remarks
from megatron_ext.observe.launch_remark import RemarkOn

FEATURES: tuple[RemarkOn, ...] = (
    trace_remarks,
    race_remarks,
)
