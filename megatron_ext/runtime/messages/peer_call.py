"""Calls of torch.distributed that another rank can make fail or wait.

If another rank fails, torch's errors name this rank's connection, and neither the cause nor the
other rank. Each such call runs in a context that notes what this rank waits for, and turns the
error into one that says which rank has failed.
"""

from __future__ import annotations

from types import TracebackType

import torch

from megatron_ext.runtime.position import whom
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.schedule.action import Action


class PeerFailure(RuntimeError):
    """Error: a call of torch.distributed cannot end, as the rank at the other end has failed."""


class PeerCall:
    """Context of a call that another rank (the peer) can make fail or wait.

    ``action`` is a message, or the name of a connection that is being made. ``direction`` is "to"
    or "from" for a message to or from the peer, and "with" for a collective. (A class costs less
    than a generator.)
    """

    __slots__ = ("_action", "_direction", "_peer", "_recorder", "_waiting")

    def __init__(self, recorder: Recorder, action: Action | str, peer: int, direction: str) -> None:
        self._recorder = recorder
        self._action = action
        self._peer = peer
        self._direction = direction
        self._waiting = recorder.waiting(action, peer, direction)

    def __enter__(self) -> None:
        self._waiting.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._waiting.__exit__(kind, error, trace)
        recorder = self._recorder
        if recorder.interruption is not None and (error is None or isinstance(error, Exception)):
            raise self._interrupted(recorder.interruption) from error
        if not isinstance(error, RuntimeError) or isinstance(error, PeerFailure):
            return
        if isinstance(error, torch.OutOfMemoryError) or str(error).startswith("CUDA error"):
            return  # the error is one of this rank's own device, not of the peer
        peers = [] if self._direction == "with" else [self._peer]
        failed, ended = recorder.why_gone(*peers)
        if failed:
            raise self._interrupted(failed) from error
        if ended:
            raise PeerFailure(
                f"{self._wait}, but a rank has ended without an error: {ended}. All ranks must "
                f"run the same number of steps. torch says: {error}"
            ) from error
        which_has = "which has" if peers else "one of which has"
        raise PeerFailure(
            f"{self._wait}, {which_has} failed, ended or hung: look for its first error "
            f"{recorder.rank_identity.note(*peers)}. torch says: {error}"
        ) from error

    def _interrupted(self, report: str) -> PeerFailure:
        return PeerFailure(f"{self._wait} when another rank had failed: {report}")

    @property
    def _wait(self) -> str:
        where = whom(self._peer, self._direction)
        return f"pipeline rank {self._recorder.rank} was waiting for {self._action} ({where})"
