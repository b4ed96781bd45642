"""One command of ``megatron-ext`` in each file: its flags, and what it prints. What it computes
stands in other packages, for callers from Python."""
