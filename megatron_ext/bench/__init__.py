"""``megatron-ext bench``: executors on emulated clocks, ours, torch's and Megatron's."""
