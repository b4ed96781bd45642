"""Layouts: the layers of each stage, chosen together with the schedule."""
