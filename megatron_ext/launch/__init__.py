"""A script launched under patches, and launch commands read, planned and checked.

A launch command is all that a user has before a training runs. Everything here starts from its
words.
"""
