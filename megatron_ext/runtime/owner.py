"""Who runs some kinds of a step's actions, as the executor knows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron_ext.schedule.action import Action, Kind

Handler = Callable[[Action], None]


class BeginAgain(Exception):
    """Raised once in a step: what has run of it is dropped, and it begins again."""


class Owner:
    """Runs the actions of some kinds in one step.

    It does not keep the handlers it gives: its own bound methods would be a cycle of references,
    which keeps the step's stages, and through them Megatron's data loaders, until Python collects
    garbage.
    """

    def handlers(self) -> Mapping[Kind, Handler]:
        """By kind, the function that runs an action. It may raise `BeginAgain`."""
        raise NotImplementedError

    def forget(self) -> None:
        """The step begins again: keep nothing of it."""
        raise AssertionError(f"no step with {type(self).__name__} begins again")

    def finish(self) -> None:
        """After the last action: nothing is left to do, and nothing kept."""

    def abandon(self) -> None:
        """After an error: give the step up, so that all ranks fail."""
