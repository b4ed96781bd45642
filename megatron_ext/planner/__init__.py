"""Schedules side by side for one model, and which to take."""
