"""Check that two launch commands train to the same numbers.

Both are run for some iterations on this machine, their numbers are recorded, and the recordings are
compared.
"""
