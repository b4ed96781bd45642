"""Operations that the parts of a model's layers run on a microbatch."""
