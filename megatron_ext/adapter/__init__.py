"""Our code in Megatron's terms: stages, settings, models.

Schedules, programs and the runtime do not depend on Megatron. This package gives them Megatron's
models, arguments and calls, and refuses what does not fit. It patches nothing: the patches in
patches/ call it.
"""
