"""Output for people: pictures and pages of timelines.

It draws what was computed elsewhere, and computes no schedule.
"""
