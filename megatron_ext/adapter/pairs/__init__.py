"""Forward and backward passes that run as one, by Megatron's schedule plans."""
