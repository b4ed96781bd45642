"""The job of ``plan`` and ``doctor``: the word that names it, its sizes, and options that go with
it.

One word says what a job is, so that a launch command, a log, a recipe, a file of arguments and
sizes are planned by the same options, and one function says which of them go together.
"""
