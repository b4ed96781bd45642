"""Transforms, which insert actions into a schedule: ``(Schedule, Problem) -> Schedule``."""
