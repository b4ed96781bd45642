"""Errors, the log, words, files and progress, for every package."""
