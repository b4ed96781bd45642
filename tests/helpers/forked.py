"""A function run in a fork of the test process, so that torch and Megatron need not be imported
anew."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path


def run_forked(function: Callable[[], object], log: Path) -> int:
    """Call ``function`` in a fork that writes its output and its exception to ``log``, and return
    the exit status."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        sys.stdout = sys.stderr = log.open("w")
        function()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)
