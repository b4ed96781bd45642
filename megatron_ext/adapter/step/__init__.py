"""Step of training or evaluation under our schedule, in place of Megatron's own.

Megatron's training loop calls one function for all passes of a step. That function is
`pipeline_step` here; the other modules are its parts.
"""
