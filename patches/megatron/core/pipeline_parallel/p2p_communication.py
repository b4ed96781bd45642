"""Messages of Megatron's own schedules to made-up peers: a rehearsal's only.

Under torch's fake backend nothing arrives, and a receive returns the uninitialised memory that it
was given. The two functions that Megatron calls for all messages are told by name what is sent and
where to receive; what they return stays theirs.

Not patched: P2PCommunicator, whose waits return at once; messages of shapes, which only varying
lengths need; ring exchange, which no recipe uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_ext.patches.engine import Patch, wrap

_P2P = "megatron.core.pipeline_parallel.p2p_communication"
_SIGNATURE = (
    "(*, tensor_send_prev, tensor_recv_prev, tensor_send_next, tensor_recv_next, group, "
    "prev_pipeline_rank, next_pipeline_rank)"
)

Act = Callable[[bool, Tensor], None]  # takes whether it is a forward message, and the tensor


def patches(send: Act, receive: Act) -> tuple[Patch, ...]:
    """Return the patches through which all messages go to ``send``, and come from ``receive``."""

    def exchange(original: Callable[..., Any], **tensors: Any) -> Any:
        works = original(**tensors)
        for act, name, is_forward in (
            (send, "tensor_send_next", True),
            (send, "tensor_send_prev", False),
            (receive, "tensor_recv_prev", True),
            (receive, "tensor_recv_next", False),
        ):
            if tensors[name] is not None:
                act(is_forward, tensors[name])
        return works

    return tuple(
        wrap(
            f"{_P2P}:{name}",
            exchange,
            reason="the fake backend leaves received tensors uninitialised",
            signature=_SIGNATURE,
        )
        for name in ("_batched_p2p_ops", "_p2p_ops")
    )
