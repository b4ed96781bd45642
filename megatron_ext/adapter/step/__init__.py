"""Step of training or evaluation under our schedule, in place of Megatron's own."""
