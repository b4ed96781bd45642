"""Overlapped forward and backward passes, run by Megatron's schedule plans."""
