"""A launch command with other flags of Megatron's, and the schedules for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_ext.planner.candidate import Candidate

if TYPE_CHECKING:
    from megatron_ext.launch.planner.variants import LaunchVariants


@dataclass(frozen=True)
class Changed:
    """Launch command with other flags of Megatron's, and the best schedules for it.

    Attributes:
        variants: the changed command under each schedule.
        candidates: the schedules to compare.
        dropped: Megatron's flags that are removed, in addition to those that a schedule replaces.
    """

    variants: LaunchVariants
    candidates: tuple[Candidate, ...]
    dropped: tuple[str, ...] = ()
