"""Owners of kinds of action, as the executor sees them.

The executor knows no kind of action by name. Each kind has one owner, which runs its actions and
cleans up at the end of a step, or after an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron_ext.schedule.action import Action, Kind

Handler = Callable[[Action], None]


class RestartStep(Exception):
    """Exception that restarts the current step; its results so far are discarded.

    Raised at most once in a step.
    """


class Owner:
    """Handler of the actions of some kinds in one step.

    A subclass must not store the handlers that it returns: its own bound methods would be a
    reference cycle, which keeps the step's stages, and through them Megatron's data loaders, alive
    until the next garbage collection.
    """

    def handlers(self) -> Mapping[Kind, Handler]:
        """Return the functions that run actions, by kind of action.

        The functions may raise `RestartStep`.
        """
        raise NotImplementedError

    def forget(self) -> None:
        """Discard the results of the step so far, because the step restarts."""
        raise AssertionError(f"a step with {type(self).__name__} is never restarted")

    def finish(self) -> None:
        """Assert after the step's last action that nothing is left to do."""

    def abandon(self) -> None:
        """End the step after an error so that all ranks fail."""
