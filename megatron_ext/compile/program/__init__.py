"""Program: messages, waits, memory and proof of a schedule, and the simulation of its times.

A schedule says what ranks compute; a program has everything that they do, and has been proved.
"""
