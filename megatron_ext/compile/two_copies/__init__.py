"""Schedules that hold every stage twice, and how they become schedules of one copy."""
