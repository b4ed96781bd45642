"""Communication of ranks through torch's store, outside of collectives.

A collective needs all ranks; the store also works when one of them has failed, or before any
process group exists.
"""
