"""Timelines as a page for a browser: what is on it (`run`, `waits`, `cut`), and its file (`write`).

All is computed here. The files in browser/ draw it and compute no schedule.
"""
