"""The planner on launch commands: what each could train under, and what is written for it."""
