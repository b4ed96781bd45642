"""Race of schedules within a training (``--pipeline-race``)."""
