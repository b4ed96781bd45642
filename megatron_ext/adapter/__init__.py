"""Our code in Megatron's terms: stages, settings, models. Patches nothing."""
