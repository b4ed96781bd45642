"""Whether two launch lines train to the same numbers."""
