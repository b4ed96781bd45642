"""Whether Transformer Engine is here, and can put weight gradients off."""

from __future__ import annotations

import importlib
import importlib.metadata
import re

OLDEST = (2, 8)  # of the versions whose own delayed weight gradients these patches are made for


def can_split() -> bool:
    """Whether there is a Transformer Engine here whose layers can put weight gradients off.

    One that cannot be imported is none, for Megatron and so for us.
    """
    try:
        version = importlib.metadata.version("transformer_engine")
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
            return False
        importlib.import_module("transformer_engine.pytorch")
    except ImportError:
        return False
    return True
