"""Every change to other people's code, one file per changed module, in a mirror of their tree.

Import this package as ``megatron_ext.patches``. Its folder must never be on ``sys.path``, because
its subfolder ``megatron`` would then be imported instead of Megatron.
"""
