"""The published families of schedules, one file for each placement or series of papers.

In the docstrings p is the number of ranks, m of microbatches, v of a rank's chunks. Each shows a
small schedule: a row per rank, a column per unit of time, ``.`` for idle, ``=`` for the
continuation of the pass to its left. A chunk's F, I and W take one unit each, its B two; messages
take none. If a rank has several chunks, a pass begins with its stage.
"""
