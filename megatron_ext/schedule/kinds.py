"""The one table of what each kind of action is: its lane, what it needs, what it holds.

verify, simulate, memory and draw read this table and name no kind. A new kind is a new row.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megatron_ext.schedule.action import Kind


class Lane(enum.Enum):
    """Where an action runs. One lane of a rank does one thing at a time, in program order.

    Compute and waits hold up what follows them on their rank. Messages are started in passing and
    end on their own time; whoever needs them waits.
    """

    COMPUTE = "compute"
    WAIT = "wait"
    SEND = "send"
    RECEIVE = "receive"


class Duty(enum.Enum):
    """What has to be done exactly once for a microbatch on a stage. Costs are given per duty."""

    FORWARD = "forward"
    INPUT_GRADIENT = "input gradient"
    WEIGHT_GRADIENT = "weight gradient"
    SEND_OUTPUT = "send of the output"
    RECEIVE_INPUT = "receive of the input"
    SEND_GRADIENT = "send of the input's gradient"
    RECEIVE_GRADIENT = "receive of the output's gradient"
    FREE_OUTPUT = "wait for the output's send"
    FREE_GRADIENT = "wait for the gradient's send"


FORWARD_ONLY_DUTIES = frozenset(
    {Duty.FORWARD, Duty.SEND_OUTPUT, Duty.RECEIVE_INPUT, Duty.FREE_OUTPUT}
)


class Held(enum.Enum):
    """Memory that lives between actions."""

    ACTIVATION = "activation"  # what the backward of a stage needs
    WEIGHT_INPUTS = "weight inputs"  # what W alone needs, once the input gradient is done


class Source(enum.Enum):
    """Where a needed action is looked for."""

    OWN = "own"  # same stage, always
    LOCAL = "local"  # the neighbouring stage, when it is on this rank
    REMOTE = "remote"  # same stage, when the neighbouring stage is on another rank


@dataclass(frozen=True)
class Need:
    """One of ``kinds``, of the same microbatch, must be done before."""

    kinds: tuple[Kind, ...]
    source: Source = Source.OWN
    neighbour: int = 0  # offset of the neighbouring stage; at the pipeline's end nothing is needed


@dataclass(frozen=True)
class Rule:
    """A row of the table."""

    lane: Lane
    covers: tuple[Duty, ...]
    needs: tuple[Need, ...] = ()
    acquires: tuple[Held, ...] = ()  # at its start
    releases: tuple[Held, ...] = ()  # at its end
    neighbour: int = 0  # the stage a message goes to or comes from, as an offset
    partner: Kind | None = None  # a message's other end

    @property
    def is_message(self) -> bool:
        return self.partner is not None

    @property
    def holds_up(self) -> bool:
        """Whether what follows on the rank waits for this action's end."""
        return self.lane in (Lane.COMPUTE, Lane.WAIT)


_GRADIENT_OF_OUTPUT = (
    Need((Kind.FORWARD,)),
    Need((Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD), Source.LOCAL, +1),
    Need((Kind.RECV_B,), Source.REMOTE, +1),
)

RULES: Mapping[Kind, Rule] = MappingProxyType(
    {
        Kind.FORWARD: Rule(
            Lane.COMPUTE,
            covers=(Duty.FORWARD,),
            needs=(
                Need((Kind.FORWARD,), Source.LOCAL, -1),
                Need((Kind.RECV_F,), Source.REMOTE, -1),
            ),
            acquires=(Held.ACTIVATION,),
        ),
        Kind.BACKWARD_INPUT: Rule(
            Lane.COMPUTE,
            covers=(Duty.INPUT_GRADIENT,),
            needs=_GRADIENT_OF_OUTPUT,
            acquires=(Held.WEIGHT_INPUTS,),
            releases=(Held.ACTIVATION,),
        ),
        Kind.BACKWARD_WEIGHT: Rule(
            Lane.COMPUTE,
            covers=(Duty.WEIGHT_GRADIENT,),
            needs=(Need((Kind.BACKWARD_INPUT,)),),
            releases=(Held.WEIGHT_INPUTS,),
        ),
        Kind.FULL_BACKWARD: Rule(
            Lane.COMPUTE,
            covers=(Duty.INPUT_GRADIENT, Duty.WEIGHT_GRADIENT),
            needs=_GRADIENT_OF_OUTPUT,
            releases=(Held.ACTIVATION,),
        ),
        Kind.SEND_F: Rule(
            Lane.SEND,
            covers=(Duty.SEND_OUTPUT,),
            needs=(Need((Kind.FORWARD,)),),
            neighbour=+1,
            partner=Kind.RECV_F,
        ),
        Kind.RECV_F: Rule(
            Lane.RECEIVE, covers=(Duty.RECEIVE_INPUT,), neighbour=-1, partner=Kind.SEND_F
        ),
        Kind.SEND_B: Rule(
            Lane.SEND,
            covers=(Duty.SEND_GRADIENT,),
            needs=(Need((Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD)),),
            neighbour=-1,
            partner=Kind.RECV_B,
        ),
        Kind.RECV_B: Rule(
            Lane.RECEIVE, covers=(Duty.RECEIVE_GRADIENT,), neighbour=+1, partner=Kind.SEND_B
        ),
        Kind.WAIT_F: Rule(
            Lane.WAIT, covers=(Duty.FREE_OUTPUT,), needs=(Need((Kind.SEND_F,)),), neighbour=+1
        ),
        Kind.WAIT_B: Rule(
            Lane.WAIT, covers=(Duty.FREE_GRADIENT,), needs=(Need((Kind.SEND_B,)),), neighbour=-1
        ),
    }
)
