"""Which layers lie on which stage, chosen together with the schedule."""
