"""Schedules that race within a training (``--pipeline-race``)."""
