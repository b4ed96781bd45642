"""Settings of Megatron that we accept and implement ourselves."""
