"""A schedule becomes a proved program, and is timed: messages, waits, memory, proof, simulation."""
