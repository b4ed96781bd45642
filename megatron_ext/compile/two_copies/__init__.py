"""Schedules that hold every stage twice, and their conversion into schedules of one copy.

Papers publish them for two copies of the model. We run them with one copy and twice the data
parallelism, which takes the same GPUs and memory.
"""
