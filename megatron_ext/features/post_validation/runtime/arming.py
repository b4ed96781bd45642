"""Decision whether optimizer steps are taken before their post-validation.

That is so while few of the latest steps were clipped or skipped, as such steps must be rolled back.
"""

from __future__ import annotations

from dataclasses import dataclass

WINDOW = 8  # number of latest steps whose outcomes are remembered
FEWEST = 2  # least number of steps before steps may overlap


@dataclass(frozen=True)
class History:
    """Record of whether each of the latest `WINDOW` steps was neither clipped nor skipped (quiet).

    The oldest comes first. All ranks have the same history, as it contains post-validated steps
    only, so all make the same decision.
    """

    quiet: tuple[bool, ...] = ()

    def then(self, is_quiet: bool) -> History:
        """Return the history with one more step."""
        return History((*self.quiet, is_quiet)[-WINDOW:])

    @property
    def bad(self) -> int:
        """Number of remembered steps that were clipped or skipped."""
        return self.quiet.count(False)

    @property
    def is_armed(self) -> bool:
        """Whether the next step is taken before its post-validation.

        That is so if fewer than half of the latest steps were clipped or skipped.
        """
        return len(self.quiet) >= FEWEST and 2 * self.bad < len(self.quiet)
