"""Schedules timed against one another within a training: who, in which turns, and who has won.

A prediction can be wrong; a race measures on the machine itself, in steps that train.
"""
