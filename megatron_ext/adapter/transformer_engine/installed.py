"""Check for a Transformer Engine that can defer weight gradients."""

from __future__ import annotations

import importlib
import importlib.metadata
import re

OLDEST = (2, 8)  # version whose own delayed weight gradients these patches were made for


def can_split() -> bool:
    """Whether a Transformer Engine is installed whose layers can defer weight gradients.

    One that cannot be imported counts as not installed, as for Megatron.
    """
    try:
        version = importlib.metadata.version("transformer_engine")
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
            return False
        importlib.import_module("transformer_engine.pytorch")
    except ImportError:
        return False
    return True
