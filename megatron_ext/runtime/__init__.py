"""HOW a program runs: torch and the schedule, no Megatron."""
