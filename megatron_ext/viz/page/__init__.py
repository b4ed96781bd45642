"""Timelines as a page for a browser: its contents (`run`, `boxes`, `cut`) and file (`write`).

Everything on the page is computed here. The files in browser/ draw it and compute no schedule.
"""
