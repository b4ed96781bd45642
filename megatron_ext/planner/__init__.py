"""Schedules side by side for one model, and which to take.

No schedule is the best one: it depends on the model, the microbatches and the memory. A plan
simulates all of them for one job and recommends a change only if it is worth one.
"""
