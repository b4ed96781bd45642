"""Messages of Megatron's own schedules to simulated peers, for rehearsals only.

Under torch's fake backend nothing arrives, and a receive returns the uninitialised memory that it
was given. Megatron sends and receives all messages by two functions, whose named arguments are the
tensors to send and to receive into. Under the patch they return the rehearsal's work handles, which
end when the simulated message would.

Not patched: P2PCommunicator, whose waits return at once; messages of shapes, which only varying
lengths need; ring exchange, which no recipe uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_ext.patches.engine import Patch, wrap

_P2P = "megatron.core.pipeline_parallel.p2p_communication"
_SIGNATURE = (
    "(*, tensor_send_prev, tensor_recv_prev, tensor_send_next, tensor_recv_next, group, "
    "prev_pipeline_rank, next_pipeline_rank)"
)

# Function that gets whether a message goes forward, and its tensor, and returns the message's work.
Act = Callable[[bool, Tensor], dist.Work]


def patches(send: Act, receive: Act) -> tuple[Patch, ...]:
    """Return patches by which Megatron's own schedules call ``send`` and ``receive``.

    All messages of these schedules go through the two functions.
    """

    def exchange(original: Callable[..., Any], **tensors: Any) -> Any:
        works = original(**tensors)
        made = {
            name: act(is_forward, tensors[f"tensor_{name}"])
            for act, name, is_forward in (
                (send, "send_next", True),
                (send, "send_prev", False),
                (receive, "recv_prev", True),
                (receive, "recv_next", False),
            )
            if tensors[f"tensor_{name}"] is not None
        }
        return list(made.values()) if isinstance(works, list) else {n: made[n] for n in works}

    return tuple(
        wrap(
            f"{_P2P}:{name}",
            exchange,
            reason="torch's fake backend leaves received tensors uninitialised",
            signature=_SIGNATURE,
        )
        for name in ("_batched_p2p_ops", "_p2p_ops")
    )
