"""Launch commands as users write them, read by Megatron itself without a GPU."""
