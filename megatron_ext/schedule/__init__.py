"""Schedules as data: actions, placements, costs, problems, and their text forms. Needs no torch and
no GPU."""
