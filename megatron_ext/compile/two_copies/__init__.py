"""Schedules that hold every stage twice, and their conversion into schedules of one copy."""
