"""Adapter between Megatron and the rest of this package: stages, settings, models.

Schedules, programs and the runtime do not depend on Megatron. The adapter gives them Megatron's
models, arguments and calls, and refuses what does not fit. It patches nothing: the patches in
patches/ call it.
"""
