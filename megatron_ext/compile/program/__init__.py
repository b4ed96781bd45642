"""Program: messages, waits, memory and proof of a schedule, and the simulation of its times."""
