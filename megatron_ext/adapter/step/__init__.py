"""A step of training or evaluation under our schedule, in the place of Megatron's own."""
