"""Launch commands as users write them, read by Megatron itself without a GPU.

A second parser of Megatron's flags would be wrong in every release. So Megatron parses and
validates the arguments, in this process.
"""
