"""Features that a folder holds whole, in parts by level.

Such a feature can be read, tested and removed as one thing: its settings, its refusals, its hooks
and its remarks stand together, each in a module that the package of its level collects.
"""
