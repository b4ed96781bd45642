"""Patches of megatron/core/pipeline_parallel/schedules.py, a file for each subject."""
