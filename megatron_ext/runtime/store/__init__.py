"""What ranks tell one another by way of torch's store, outside of collectives."""
