"""How a user's mistake ends a launch."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def exit_for(error: Exception) -> NoReturn:
    """Exit with status 2, like a command line's parser; global rank 0 says why, for all."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"megatron_ext: error: {error}\n")
    raise SystemExit(2)
