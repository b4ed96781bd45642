"""What a launch line could be instead, on the same GPUs."""
