"""Features, each with all its code in one folder.

Such a feature can be read, tested and removed as one thing: its settings, its refusals, its hooks
and its remarks are modules of the folder. For each of these kinds of module one table lists those
of all features.
"""
