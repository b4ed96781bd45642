"""What the parts of a model's layers do with a microbatch, by operation."""
