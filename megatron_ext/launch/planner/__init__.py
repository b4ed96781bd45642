"""The planner on launch commands: the alternatives to each, and the flags for them."""
