"""Schedules timed against one another within a training: who, in which turns, and who has won."""
