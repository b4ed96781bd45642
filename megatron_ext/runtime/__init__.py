"""Execution of a program on a rank: torch and the schedule, no Megatron."""
