"""Steps that can be taken back: what is told of them, and what is kept."""
