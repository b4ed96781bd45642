"""Searches for schedules, for searching families: timing, filling, packing, bounds, certificates,
cache."""
