"""Race of schedules within a training: its contestants, turns, record and winner.

A prediction can be wrong; a race measures on the machine itself, in steps that train.
"""
