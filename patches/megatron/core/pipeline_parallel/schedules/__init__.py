"""Patches of megatron/core/pipeline_parallel/schedules.py, one file per subject."""
