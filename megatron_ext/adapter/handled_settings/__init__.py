"""Settings of Megatron that we accept and implement ourselves.

Megatron's own pipeline functions implement them in a way that our schedules replace. Refusing them
would refuse launches for no reason.
"""
