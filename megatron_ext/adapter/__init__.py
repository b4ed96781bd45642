"""Our code in Megatron's words: its stages, its settings, its models. Patches nothing."""
