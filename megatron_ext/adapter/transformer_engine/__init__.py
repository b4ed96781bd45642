"""What Transformer Engine can do here, and what it asks of a schedule."""
