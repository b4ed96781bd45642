"""Communication between ranks: channels, batches, collectives and their process groups.

The program has decided every message and its place; here they are only sent.
"""
