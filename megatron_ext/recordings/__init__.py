"""Recordings of the ranks of a run, and the differences of two recordings.

They are files, so that runs on different days and machines can be compared.
"""
