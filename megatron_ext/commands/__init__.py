"""One command of ``megatron-ext`` in each file: its flags, and what it prints."""
