"""The launch of a training, read from its log: its arguments, and the seconds and bytes that it
measured.

A user whose training runs already may have nothing but its log.
"""
