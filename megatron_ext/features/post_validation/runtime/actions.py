"""Actions of post-validation in a step.

A step's program has an action for each message of the chain and for the moment at which the verdict
is needed. The handlers of these actions call `messages` and tell the adapter what to commit.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_ext.runtime.owner import Handler, Owner, RestartStep
from megatron_ext.schedule.action import Action, Kind


class Validation(Owner):
    """Owner of post-validation's actions: validate the previous step during the current one."""

    def expect(self) -> None:
        """Start to receive the verdict: whether the previous optimizer step stands.

        On arrival the verdict is passed back to earlier ranks.
        """
        raise NotImplementedError

    def commit_or_rollback(self) -> bool:
        """Wait for the verdict on the previous optimizer step; return whether it is committed.

        If not, it has been rolled back and redone as Megatron does it. Random states and data of
        the current step have been restored as well, and the current step restarts.
        """
        raise NotImplementedError

    def handlers(self) -> Mapping[Kind, Handler]:
        return {
            Kind.RECV_V: self._expect,
            Kind.SEND_V: self._expect,
            Kind.SETTLE: self._commit_or_rollback,
        }

    def forget(self) -> None:
        """Do nothing when the step restarts: the verdict has arrived, and is not stored here."""

    def _expect(self, action: Action) -> None:
        self.expect()

    def _commit_or_rollback(self, action: Action) -> None:
        if not self.commit_or_rollback():
            raise RestartStep
