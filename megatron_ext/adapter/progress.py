"""Searches and builds that take long, told of in a training's log."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

from megatron_ext.logger import logger
from megatron_ext.schedule.progress import reporting


def telling_of_long_work(rank: int) -> AbstractContextManager[None]:
    """Within, the log says after some seconds what is done, how far it is and when it ends at the
    latest, and again now and then. ``rank``: of the world, all of which do the same; 0 tells."""
    return reporting(logger.info, logger.warning) if rank == 0 else contextlib.nullcontext()
