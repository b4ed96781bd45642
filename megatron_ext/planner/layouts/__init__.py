"""Layouts: the layers of each stage, chosen together with the schedule.

A slow stage delays every microbatch, and which stage is slow depends on the schedule: embedding,
output layer and tower are on other ranks under another placement.
"""
