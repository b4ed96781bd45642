"""Check for a Transformer Engine that can defer weight gradients.

An older version computes weight gradients in the backward pass whatever the schedule says, and a
broken installation cannot be patched.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re

# Oldest Transformer Engine version whose delayed weight gradients fit these patches.
OLDEST = (2, 8)


def can_split() -> bool:
    """Return whether a Transformer Engine is installed whose layers can defer weight gradients.

    A Transformer Engine that cannot be imported counts as not installed, as in Megatron.
    """
    try:
        version = importlib.metadata.version("transformer_engine")
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
            return False
        importlib.import_module("transformer_engine.pytorch")
    except ImportError:
        return False
    return True
