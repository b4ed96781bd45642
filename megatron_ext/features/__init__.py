"""Features whose code is all in one folder each, with a module or package for each level of
imports.

Such a feature can be read, tested and removed as one thing: its settings, its refusals, its hooks
and its remarks are next to each other. For each of these levels one table lists the modules of all
features.
"""
