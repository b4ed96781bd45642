"""WHAT runs WHEN: schedules as data, made, proved, simulated and drawn. No torch, no GPU."""
