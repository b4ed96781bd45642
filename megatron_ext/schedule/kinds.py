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
    end on their own time; whoever needs them waits. So are collectives, in which all ranks of the
    pipeline take part, and copies between a rank's memory and the host's.
    """

    COMPUTE = "compute"
    WAIT = "wait"
    SEND = "send"
    RECEIVE = "receive"
    COLLECTIVE = "collective"
    TO_HOST = "copy to the host"
    FROM_HOST = "copy from the host"


HOST_LANES = (Lane.TO_HOST, Lane.FROM_HOST)


class Where(enum.Enum):
    """On which stages a kind is found."""

    STAGE = "every stage"
    SHARD = "the first stage of a rank, beside which its shard of the vocabulary lies"
    GIVER = "the first stage of a rank that gives to a collective and uses nothing of it"
    LOSS = "the first stage of the rank that has the last stage, and so the loss"
    RANK = "the first stage of a rank, once a step, as microbatch 0"


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
    LOGITS = "logits of a shard"
    LOGITS_INPUT_GRADIENT = "shard's part of the last hidden states' gradient"
    LOGITS_WEIGHT_GRADIENT = "gradient of the output layer's shard"
    LOSS = "loss"
    EMBEDDING = "lookup in a shard"
    EMBEDDING_WEIGHT_GRADIENT = "gradient of the embedding's shard"
    SHARE_HIDDEN_STATES = "broadcast of the last hidden states"
    SHARE_STATISTICS = "exchange of the logits' statistics"
    SUM_INPUT_GRADIENT = "sum of the last hidden states' gradient"
    SHARE_LOSS_GRADIENT = "broadcast of the loss's gradient"
    SHARE_TOKENS = "broadcast of the tokens"
    SUM_EMBEDDINGS = "sum of the embeddings"
    SHARE_EMBEDDING_GRADIENT = "broadcast of the embeddings' gradient"
    FREE_STATISTICS = "wait for the exchange of the logits' statistics"
    FREE_INPUT_GRADIENT = "wait for the sum of the last hidden states' gradient"
    FREE_EMBEDDINGS = "wait for the sum of the embeddings"
    OFFLOAD_ACTIVATION = "copy of the activation to the host"
    FREE_ACTIVATION = "wait for the activation's copy to the host"
    RELOAD_ACTIVATION = "copy of the activation from the host"
    OFFLOAD_WEIGHT_INPUTS = "copy of what W needs to the host"
    FREE_WEIGHT_INPUTS = "wait for that copy to the host"
    RELOAD_WEIGHT_INPUTS = "copy of what W needs from the host"
    RECEIVE_PARTIAL_STATE = "receive of the partial validation state"
    OPTIMIZER_STEP = "optimizer step on the partial state"
    SEND_PARTIAL_STATE = "send of the partial validation state"
    RECEIVE_VERDICT = "receive of the last step's verdict"
    SETTLE = "wait for the last step's verdict"
    SEND_VERDICT = "send of the last step's verdict"


FORWARD_ONLY_DUTIES = frozenset(
    {
        Duty.FORWARD,
        Duty.SEND_OUTPUT,
        Duty.RECEIVE_INPUT,
        Duty.FREE_OUTPUT,
        Duty.LOGITS,
        Duty.LOSS,
        Duty.EMBEDDING,
        Duty.SHARE_HIDDEN_STATES,
        Duty.SHARE_STATISTICS,
        Duty.SHARE_TOKENS,
        Duty.SUM_EMBEDDINGS,
        Duty.FREE_STATISTICS,
        Duty.FREE_EMBEDDINGS,
    }
)

# What adds to the gradients of a stage's parameters, or of the shard beside it.
GRADIENT_DUTIES = frozenset(
    {Duty.WEIGHT_GRADIENT, Duty.LOGITS_WEIGHT_GRADIENT, Duty.EMBEDDING_WEIGHT_GRADIENT}
)

# What is done for some microbatches and not for others: all of a group, or none of it.
OPTIONAL_DUTIES = (
    frozenset({Duty.OFFLOAD_ACTIVATION, Duty.FREE_ACTIVATION, Duty.RELOAD_ACTIVATION}),
    frozenset({Duty.OFFLOAD_WEIGHT_INPUTS, Duty.FREE_WEIGHT_INPUTS, Duty.RELOAD_WEIGHT_INPUTS}),
)


class Held(enum.Enum):
    """Memory that lives between actions."""

    ACTIVATION = "activation"  # what the backward of a stage needs
    WEIGHT_INPUTS = "weight inputs"  # what W alone needs, once the input gradient is done
    LOGITS = "logits"  # a shard's, and the hidden states they are made of
    MESSAGE = "message"  # from its receive to the pass that uses it; from the pass to its wait


class Source(enum.Enum):
    """Where a needed action is looked for."""

    OWN = "own"  # same stage, always
    LOCAL = "local"  # the neighbouring stage, when it is on this rank
    REMOTE = "remote"  # same stage, when the neighbouring stage is on another rank
    INPUT_SHARD = "input shard"  # of the first stage: the first stage of its rank
    OUTPUT_SHARD = "output shard"  # of the last stage: the first stage of its rank
    FIRST = "first"  # the first stage, when it is on this rank
    LAST = "last"  # the last stage, when it is on this rank


@dataclass(frozen=True)
class Need:
    """One of ``kinds``, of the same microbatch, must be done before: if there is one."""

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
    moves: tuple[Held, ...] = ()  # between the rank's memory and the host's
    neighbour: int = 0  # the stage a message goes to or comes from, as an offset
    partner: Kind | None = None  # a message's other end
    where: Where = Where.STAGE

    @property
    def is_message(self) -> bool:
        return self.partner is not None

    @property
    def holds_up(self) -> bool:
        """Whether what follows on the rank waits for this action's end."""
        return self.lane in (Lane.COMPUTE, Lane.WAIT)


_BACKWARD_NEEDS = (
    Need((Kind.FORWARD,)),
    Need((Kind.RELOAD_F,)),
    Need((Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD), Source.LOCAL, +1),
    Need((Kind.RECV_B,), Source.REMOTE, +1),
    Need((Kind.REDUCE_SI,), Source.OUTPUT_SHARD),
    Need((Kind.LOSS,), Source.OUTPUT_SHARD),
)

RULES: Mapping[Kind, Rule] = MappingProxyType(
    {
        Kind.FORWARD: Rule(
            Lane.COMPUTE,
            covers=(Duty.FORWARD,),
            needs=(
                Need((Kind.FORWARD,), Source.LOCAL, -1),
                Need((Kind.RECV_F,), Source.REMOTE, -1),
                Need((Kind.REDUCE_E,), Source.INPUT_SHARD),
            ),
            acquires=(Held.ACTIVATION,),
        ),
        Kind.BACKWARD_INPUT: Rule(
            Lane.COMPUTE,
            covers=(Duty.INPUT_GRADIENT,),
            needs=_BACKWARD_NEEDS,
            acquires=(Held.WEIGHT_INPUTS,),
            releases=(Held.ACTIVATION,),
        ),
        Kind.BACKWARD_WEIGHT: Rule(
            Lane.COMPUTE,
            covers=(Duty.WEIGHT_GRADIENT,),
            needs=(Need((Kind.BACKWARD_INPUT,)), Need((Kind.RELOAD_I,))),
            releases=(Held.WEIGHT_INPUTS,),
        ),
        Kind.FULL_BACKWARD: Rule(
            Lane.COMPUTE,
            covers=(Duty.INPUT_GRADIENT, Duty.WEIGHT_GRADIENT),
            needs=_BACKWARD_NEEDS,
            releases=(Held.ACTIVATION,),
        ),
        Kind.SEND_F: Rule(
            Lane.SEND,
            covers=(Duty.SEND_OUTPUT,),
            needs=(Need((Kind.FORWARD,)),),
            acquires=(Held.MESSAGE,),
            neighbour=+1,
            partner=Kind.RECV_F,
        ),
        Kind.RECV_F: Rule(
            Lane.RECEIVE,
            covers=(Duty.RECEIVE_INPUT,),
            acquires=(Held.MESSAGE,),
            neighbour=-1,
            partner=Kind.SEND_F,
        ),
        Kind.SEND_B: Rule(
            Lane.SEND,
            covers=(Duty.SEND_GRADIENT,),
            needs=(Need((Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD)),),
            acquires=(Held.MESSAGE,),
            neighbour=-1,
            partner=Kind.RECV_B,
        ),
        Kind.RECV_B: Rule(
            Lane.RECEIVE,
            covers=(Duty.RECEIVE_GRADIENT,),
            acquires=(Held.MESSAGE,),
            neighbour=+1,
            partner=Kind.SEND_B,
        ),
        Kind.WAIT_F: Rule(
            Lane.WAIT,
            covers=(Duty.FREE_OUTPUT,),
            needs=(Need((Kind.SEND_F,)),),
            releases=(Held.MESSAGE,),
            neighbour=+1,
        ),
        Kind.WAIT_B: Rule(
            Lane.WAIT,
            covers=(Duty.FREE_GRADIENT,),
            needs=(Need((Kind.SEND_B,)),),
            releases=(Held.MESSAGE,),
            neighbour=-1,
        ),
        Kind.BCAST_S: Rule(
            Lane.COLLECTIVE,
            covers=(Duty.SHARE_HIDDEN_STATES,),
            needs=(Need((Kind.FORWARD,), Source.LAST),),
            where=Where.SHARD,
        ),
        Kind.LOGITS: Rule(
            Lane.COMPUTE,
            covers=(Duty.LOGITS,),
            needs=(Need((Kind.BCAST_S,)),),
            acquires=(Held.LOGITS,),
            where=Where.SHARD,
        ),
        Kind.GATHER_S: Rule(
            Lane.COLLECTIVE,
            covers=(Duty.SHARE_STATISTICS,),
            needs=(Need((Kind.LOGITS,)),),
            where=Where.SHARD,
        ),
        Kind.LOSS: Rule(
            Lane.COMPUTE,
            covers=(Duty.LOSS,),
            needs=(Need((Kind.GATHER_S,)),),
            where=Where.LOSS,
        ),
        Kind.LOGITS_INPUT: Rule(
            Lane.COMPUTE,
            covers=(Duty.LOGITS_INPUT_GRADIENT,),
            needs=(Need((Kind.GATHER_S,)),),
            where=Where.SHARD,
        ),
        Kind.REDUCE_SI: Rule(
            Lane.COLLECTIVE,
            covers=(Duty.SUM_INPUT_GRADIENT,),
            needs=(Need((Kind.LOGITS_INPUT,)),),
            where=Where.SHARD,
        ),
        Kind.BCAST_SW: Rule(
            Lane.COLLECTIVE,
            covers=(Duty.SHARE_LOSS_GRADIENT,),
            needs=(Need((Kind.LOSS,)),),
            where=Where.SHARD,
        ),
        Kind.LOGITS_WEIGHT: Rule(
            Lane.COMPUTE,
            covers=(Duty.LOGITS_WEIGHT_GRADIENT,),
            needs=(Need((Kind.LOGITS_INPUT,)), Need((Kind.BCAST_SW,))),
            releases=(Held.LOGITS,),
            where=Where.SHARD,
        ),
        Kind.BCAST_E: Rule(Lane.COLLECTIVE, covers=(Duty.SHARE_TOKENS,), where=Where.SHARD),
        Kind.EMBEDDING: Rule(
            Lane.COMPUTE,
            covers=(Duty.EMBEDDING,),
            needs=(Need((Kind.BCAST_E,)),),
            where=Where.SHARD,
        ),
        Kind.REDUCE_E: Rule(
            Lane.COLLECTIVE,
            covers=(Duty.SUM_EMBEDDINGS,),
            needs=(Need((Kind.EMBEDDING,)),),
            where=Where.SHARD,
        ),
        Kind.BCAST_EW: Rule(
            Lane.COLLECTIVE,
            covers=(Duty.SHARE_EMBEDDING_GRADIENT,),
            needs=(Need((Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD), Source.FIRST),),
            where=Where.SHARD,
        ),
        Kind.EMBEDDING_WEIGHT: Rule(
            Lane.COMPUTE,
            covers=(Duty.EMBEDDING_WEIGHT_GRADIENT,),
            needs=(Need((Kind.BCAST_EW,)), Need((Kind.EMBEDDING,))),
            where=Where.SHARD,
        ),
        Kind.WAIT_S: Rule(
            Lane.WAIT,
            covers=(Duty.FREE_STATISTICS,),
            needs=(Need((Kind.GATHER_S,)),),
            where=Where.GIVER,
        ),
        Kind.WAIT_SI: Rule(
            Lane.WAIT,
            covers=(Duty.FREE_INPUT_GRADIENT,),
            needs=(Need((Kind.REDUCE_SI,)),),
            where=Where.GIVER,
        ),
        Kind.WAIT_E: Rule(
            Lane.WAIT,
            covers=(Duty.FREE_EMBEDDINGS,),
            needs=(Need((Kind.REDUCE_E,)),),
            where=Where.GIVER,
        ),
        Kind.OFFLOAD_F: Rule(
            Lane.TO_HOST,
            covers=(Duty.OFFLOAD_ACTIVATION,),
            needs=(Need((Kind.FORWARD,)),),
            moves=(Held.ACTIVATION,),
        ),
        Kind.FREE_F: Rule(
            Lane.WAIT,
            covers=(Duty.FREE_ACTIVATION,),
            needs=(Need((Kind.OFFLOAD_F,)),),
            releases=(Held.ACTIVATION,),
        ),
        Kind.RELOAD_F: Rule(
            Lane.FROM_HOST,
            covers=(Duty.RELOAD_ACTIVATION,),
            needs=(Need((Kind.FREE_F,)),),
            acquires=(Held.ACTIVATION,),
            moves=(Held.ACTIVATION,),
        ),
        Kind.OFFLOAD_I: Rule(
            Lane.TO_HOST,
            covers=(Duty.OFFLOAD_WEIGHT_INPUTS,),
            needs=(Need((Kind.BACKWARD_INPUT,)),),
            moves=(Held.WEIGHT_INPUTS,),
        ),
        Kind.FREE_I: Rule(
            Lane.WAIT,
            covers=(Duty.FREE_WEIGHT_INPUTS,),
            needs=(Need((Kind.OFFLOAD_I,)),),
            releases=(Held.WEIGHT_INPUTS,),
        ),
        Kind.RELOAD_I: Rule(
            Lane.FROM_HOST,
            covers=(Duty.RELOAD_WEIGHT_INPUTS,),
            needs=(Need((Kind.FREE_I,)),),
            acquires=(Held.WEIGHT_INPUTS,),
            moves=(Held.WEIGHT_INPUTS,),
        ),
        Kind.RECV_P: Rule(
            Lane.RECEIVE,
            covers=(Duty.RECEIVE_PARTIAL_STATE,),
            neighbour=-1,
            partner=Kind.SEND_P,
            where=Where.RANK,
        ),
        Kind.STEP: Rule(
            Lane.WAIT,
            covers=(Duty.OPTIMIZER_STEP,),
            needs=(Need((Kind.RECV_P,)),),
            where=Where.RANK,
        ),
        Kind.SEND_P: Rule(
            Lane.SEND,
            covers=(Duty.SEND_PARTIAL_STATE,),
            needs=(Need((Kind.STEP,)),),
            neighbour=+1,
            partner=Kind.RECV_P,
            where=Where.RANK,
        ),
        Kind.RECV_V: Rule(
            Lane.RECEIVE,
            covers=(Duty.RECEIVE_VERDICT,),
            neighbour=+1,
            partner=Kind.SEND_V,
            where=Where.RANK,
        ),
        Kind.SETTLE: Rule(
            Lane.WAIT,
            covers=(Duty.SETTLE,),
            needs=(Need((Kind.RECV_V,)),),
            where=Where.RANK,
        ),
        Kind.SEND_V: Rule(
            Lane.SEND,
            covers=(Duty.SEND_VERDICT,),
            needs=(Need((Kind.RECV_V,)),),
            neighbour=-1,
            partner=Kind.RECV_V,
            where=Where.RANK,
        ),
    }
)
