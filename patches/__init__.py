"""Every change to other people's code, one file per changed module, in a mirror of their tree.

Import it as ``megatron_ext.patches``. This folder itself must never be on ``sys.path``: its
``megatron`` would stand before the real one.
"""
