"""Who runs some kinds of a step's actions, as the executor knows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron_ext.schedule.action import Action, Kind

Handler = Callable[[Action], None]


class BeginAgain(Exception):
    """What has run of a step does not count: it begins again, once."""


class Owner:
    """Of some kinds, for one step.

    It does not keep the handlers it gives: its own bound methods would be a cycle of references,
    which keeps the step's stages, and through them Megatron's data loaders, until Python collects
    garbage.
    """

    def handlers(self) -> Mapping[Kind, Handler]:
        """By kind, what runs an action; `BeginAgain` may come of it."""
        raise NotImplementedError

    def forget(self) -> None:
        """The step begins again: keep nothing of it."""
        raise AssertionError(f"no step with {type(self).__name__} begins again")

    def finish(self) -> None:
        """After the last action: nothing is left to do, and nothing kept."""

    def abandon(self) -> None:
        """After an error: give the step up, so that all ranks fail."""
