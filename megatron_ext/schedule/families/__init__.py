"""The published families of schedules, one file for each placement or line of papers."""
