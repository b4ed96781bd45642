"""Execution of a program on a rank: torch and the schedule, no Megatron.

A program says what each rank does and in which order. The executor walks the rank's row; stages do
the passes, and a transport sends the messages.
"""
