"""Transforms, which insert actions into a schedule: ``(Schedule, Problem) -> Schedule``. A family
need not know of them."""
