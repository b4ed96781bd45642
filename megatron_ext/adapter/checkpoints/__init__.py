"""Contents of checkpoints, and the judgement whether a launch command can load one."""
