"""Communication of ranks through torch's store, outside of collectives."""
