"""Other parallel sizes for a described training job: their space, estimates and search."""
