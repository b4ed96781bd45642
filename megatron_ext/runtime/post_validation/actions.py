"""The actions of post-validation in a step."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_ext.runtime.owner import BeginAgain, Handler, Owner
from megatron_ext.schedule.action import Action, Kind


class Validation(Owner):
    """Validates the step before the one that runs."""

    def expect(self) -> None:
        """The verdict on the last step may come from now on; it is passed back as it comes."""
        raise NotImplementedError

    def commit_or_rollback(self) -> bool:
        """Whether that step stands, when its verdict has come.

        If not, it has been taken back and done as it should be, and so have random states and data
        of the step that runs: it begins again.
        """
        raise NotImplementedError

    def handlers(self) -> Mapping[Kind, Handler]:
        return {
            Kind.RECV_V: self._expect,
            Kind.SEND_V: self._expect,
            Kind.SETTLE: self._commit_or_rollback,
        }

    def forget(self) -> None:
        """Nothing to drop: the verdict has come, and is not kept here."""

    def _expect(self, action: Action) -> None:
        self.expect()

    def _commit_or_rollback(self, action: Action) -> None:
        if not self.commit_or_rollback():
            raise BeginAgain
