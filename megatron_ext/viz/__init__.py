"""Output for people: pictures, traces, and explanations of the time that a step takes."""
