"""Activation offload in Megatron's terms."""
