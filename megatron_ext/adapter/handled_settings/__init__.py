"""Settings of Megatron's that are accepted, and whose work is done by ours."""
