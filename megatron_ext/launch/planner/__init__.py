"""The planner on launch commands: the alternatives to each, and the flags for them.

The planner (`megatron_ext.planner`) knows models and schedules. Here a launch command becomes such
a job, and a plan becomes words that can be pasted.
"""
