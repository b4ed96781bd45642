"""Communication between ranks: channels, batches, collectives and their process groups."""
