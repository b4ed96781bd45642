"""The one table of the properties of each kind of action: its lane, its dependencies, its memory.

verify, simulate, memory and draw read this table and name no kind. A new kind is a new row.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.placement import Neighbour


class Lane(enum.Enum):
    """Resource of a rank that an action occupies. A lane runs one action at a time, in order.

    Compute and waits block the later actions of their rank. Messages, collectives and copies do
    not: they are started between passes and end later, and actions that need them wait for their
    end. All ranks of the pipeline take part in a collective; copies go between a rank's memory and
    the host's.
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
    """Stages on which actions of a kind exist."""

    STAGE = "every stage"
    SHARD = "the first stage of a rank, which has the rank's shard of the vocabulary"
    GIVER = "the first stage of a rank that gives to a collective and uses nothing of it"
    LOSS = "the first stage of the rank that has the last stage, and so the loss"
    RANK = "the first stage of a rank, once a step, as microbatch 0"


class Cost(enum.Enum):
    """Rule for the time that an action of a kind takes on its lane (`Costs.of`)."""

    NOTHING = "nothing: waits, receives, whose senders take the time, and messages of a few bytes"
    PASS = "seconds of the pass; of one that does others' work, theirs together"
    REPEATED_PASS = "seconds of the pass that is repeated, unless those of R are given"
    P2P_SECONDS = "a message on the link behind a stage"
    COLLECTIVE = "a message between ranks; a collective takes the mean of the links that it spans"
    COPY = "a copy to the host or back"


class Held(enum.Enum):
    """Kinds of memory that one action allocates and a later action frees."""

    ACTIVATION = "activation"  # stored tensors that the backward pass of a stage needs
    # Stored tensors that W still needs after the input gradient is computed.
    WEIGHT_INPUTS = "weight inputs"
    INPUT = "input"  # input of a stage, stored instead of an activation that is recomputed
    # Logits of a rank's part of the vocabulary, and the hidden states that give them.
    LOGITS = "logits"
    # Keys and values of a sliced microbatch. Their gradients take the same bytes.
    KEYS_VALUES = "keys and values"
    # Memory of a message: from its receive to the pass that uses it, or from the pass that makes it
    # to the wait for its send.
    MESSAGE = "message"


class Source(enum.Enum):
    """Stages among which the dependency of an action is looked for."""

    SAME = "same"  # the action depends on one of the same stage
    # The action depends on one of the neighbouring stage, if that stage is on the same rank.
    LOCAL = "local"
    # The action depends on one of the same stage, if the neighbouring stage is on another rank.
    REMOTE = "remote"
    # The action depends on one that the rank with the model's first stage runs for its shard of the
    # embedding. Such actions count as those of the rank's first stage.
    INPUT_SHARD = "input shard"
    # The action depends on one that the rank with the model's last stage runs for its shard of the
    # output layer. Such actions count as those of the rank's first stage.
    OUTPUT_SHARD = "output shard"
    # The action depends on one of the model's first stage, if that stage is on the same rank.
    FIRST = "first"
    # The action depends on one of the model's last stage, if that stage is on the same rank.
    LAST = "last"


@dataclass(frozen=True)
class Need:
    """Dependency on an action of one of ``kinds`` for the same microbatch or slice.

    The dependency counts only if the schedule has such an action.
    """

    kinds: tuple[Kind, ...]
    source: Source = Source.SAME
    # Stage whose action is needed; a stage at an end of the pipeline has no such neighbour, and
    # needs nothing.
    neighbour: Neighbour | None = None
    # Needed slice, relative to the action's own: the slice before or after it, if there is one.
    slice: Neighbour | None = None


@dataclass(frozen=True)
class Rule:
    """One row of the table of kinds of actions: what an action of this kind needs, holds and costs.

    Attributes:
        kind: the kind that this row describes.
        does: what an action of this kind does, in words for people.
        lane: the lane that an action of this kind runs on.
        parts: for a kind that does the work of other kinds (`covers`), these kinds.
        needs: dependencies on other actions.
        acquires, releases: the memory that the action allocates at its start, and frees at its end.
        moves: the memory that the action copies between the rank and the host.
        gathers: memory to which the action adds gradients slice by slice, if microbatches are cut
            into slices. This memory takes as many bytes as for the whole microbatch, from its last
            slice to its first.
        neighbour: the stage that a message goes to or comes from, or that a wait is about.
        partner: the kind at the other end of a message.
        where: the stages on which actions of this kind exist.
        in_evaluation: whether evaluation, which has no backward passes, has this kind too.
        adds_to_gradients: whether the action adds to gradients of the stage's parameters, or of the
            vocabulary shard on the same rank.
        repeats: the kind of pass that this kind recomputes. Such a kind is optional. If the
            schedule has it, the first pass keeps only the stage's input (`Held.INPUT`), and the
            recomputing pass allocates the rest.
        all_or_none: for kinds that are done for some microbatches only. For each microbatch, either
            all kinds with the same entry are done, or none.
        reads_data: whether a stage reads a microbatch's data with this action, from an iterator
            without numbers: the n-th such action of a stage gets the n-th microbatch.
        overlaps_with: the kinds of pass of which one can run at the same time on the same rank
            (`action.OverlappedPasses`).
        by_optimizer: whether the optimizer's step does the action, after the run of the schedule.
            The action is in the schedule for the proof, the simulator and pictures.
        option: the field of `ScheduleOptions` that requests this kind; "" for passes and messages.
        cost: rule for the time that the action takes.
        colour: fill of the kind's boxes in pictures, if it computes: Okabe and Ito's palette
            (2008), to which B, R and the embedding's weight gradient are added. People with any
            colour vision tell them apart (a test computes it). Grey: not chosen yet.
        legend: its name in the legend of a picture, if that is shorter than ``does``.
        marker: matplotlib's marker of a point in time, for a kind that is drawn as one.
    """

    kind: Kind
    does: str
    lane: Lane
    parts: tuple[Kind, ...] = ()
    needs: tuple[Need, ...] = ()
    acquires: tuple[Held, ...] = ()
    releases: tuple[Held, ...] = ()
    moves: tuple[Held, ...] = ()
    gathers: tuple[Held, ...] = ()
    neighbour: Neighbour | None = None
    partner: Kind | None = None
    where: Where = Where.STAGE
    in_evaluation: bool = False
    adds_to_gradients: bool = False
    repeats: Kind | None = None
    all_or_none: Held | None = None
    by_optimizer: bool = False
    option: str = ""
    cost: Cost = Cost.NOTHING
    colour: str = "#999999"
    legend: str = ""
    marker: str = ""
    reads_data: bool = False
    overlaps_with: tuple[Kind, ...] = ()

    @cached_property
    def covers(self) -> tuple[Kind, ...]:
        """Kinds of passes whose work this kind does: I and W for B, else the kind itself.

        Each of them must be done exactly once for each microbatch on a stage, and costs are given
        for them.
        """
        return self.parts or (self.kind,)

    @property
    def label(self) -> str:
        """Name of this kind of action in the legend of a picture."""
        return self.legend or self.does

    @property
    def is_message(self) -> bool:
        return self.partner is not None

    @property
    def is_blocking(self) -> bool:
        """Whether later actions of the rank wait for the end of an action of this kind."""
        return self.lane in (Lane.COMPUTE, Lane.WAIT)


_BACKWARD_NEEDS = (
    Need((Kind.FORWARD,)),
    Need((Kind.RELOAD_F,)),
    Need((Kind.RECOMPUTE,)),
    Need((Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD), Source.LOCAL, Neighbour.NEXT),
    Need((Kind.RECV_B,), Source.REMOTE, Neighbour.NEXT),
    Need((Kind.REDUCE_SI,), Source.OUTPUT_SHARD),
    Need((Kind.LOSS,), Source.OUTPUT_SHARD),
    # Backward passes of later slices return gradients of the keys and values that those slices
    # attended to.
    Need((Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD), slice=Neighbour.NEXT),
)

_ROWS = (
    Rule(
        Kind.FORWARD,
        "forward",
        Lane.COMPUTE,
        needs=(
            Need((Kind.FORWARD,), Source.LOCAL, Neighbour.PREVIOUS),
            Need((Kind.RECV_F,), Source.REMOTE, Neighbour.PREVIOUS),
            Need((Kind.REDUCE_E,), Source.INPUT_SHARD),
            # The forward pass of a slice needs the keys and values of the previous slice.
            Need((Kind.FORWARD,), slice=Neighbour.PREVIOUS),
        ),
        acquires=(Held.ACTIVATION,),
        in_evaluation=True,
        reads_data=True,
        overlaps_with=(Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD),
        cost=Cost.PASS,
        colour="#56B4E9",
    ),
    Rule(
        Kind.BACKWARD_INPUT,
        "input gradient",
        Lane.COMPUTE,
        needs=_BACKWARD_NEEDS,
        acquires=(Held.WEIGHT_INPUTS,),
        releases=(Held.ACTIVATION,),
        gathers=(Held.KEYS_VALUES,),
        cost=Cost.PASS,
        colour="#E69F00",
    ),
    Rule(
        Kind.BACKWARD_WEIGHT,
        "weight gradient",
        Lane.COMPUTE,
        needs=(Need((Kind.BACKWARD_INPUT,)), Need((Kind.RELOAD_I,))),
        releases=(Held.WEIGHT_INPUTS,),
        adds_to_gradients=True,
        cost=Cost.PASS,
        colour="#009E73",
    ),
    Rule(
        Kind.FULL_BACKWARD,
        "whole backward pass",
        Lane.COMPUTE,
        parts=(Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT),
        needs=_BACKWARD_NEEDS,
        releases=(Held.ACTIVATION,),
        gathers=(Held.KEYS_VALUES,),
        adds_to_gradients=True,
        cost=Cost.PASS,
        colour="#8050E0",
        legend="backward (I and W)",
    ),
    Rule(
        Kind.RECOMPUTE,
        "recomputation",
        Lane.COMPUTE,
        needs=(Need((Kind.FORWARD,)),),
        acquires=(Held.ACTIVATION,),
        repeats=Kind.FORWARD,
        cost=Cost.REPEATED_PASS,
        colour="#A9DBF5",
    ),
    Rule(
        Kind.SEND_F,
        "send of the output",
        Lane.SEND,
        needs=(Need((Kind.FORWARD,)),),
        acquires=(Held.MESSAGE,),
        neighbour=Neighbour.NEXT,
        partner=Kind.RECV_F,
        in_evaluation=True,
        cost=Cost.P2P_SECONDS,
    ),
    Rule(
        Kind.RECV_F,
        "receive of the input",
        Lane.RECEIVE,
        acquires=(Held.MESSAGE,),
        neighbour=Neighbour.PREVIOUS,
        partner=Kind.SEND_F,
        in_evaluation=True,
    ),
    Rule(
        Kind.SEND_B,
        "send of the input's gradient",
        Lane.SEND,
        needs=(Need((Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD)),),
        acquires=(Held.MESSAGE,),
        neighbour=Neighbour.PREVIOUS,
        partner=Kind.RECV_B,
        cost=Cost.P2P_SECONDS,
    ),
    Rule(
        Kind.RECV_B,
        "receive of the output's gradient",
        Lane.RECEIVE,
        acquires=(Held.MESSAGE,),
        neighbour=Neighbour.NEXT,
        partner=Kind.SEND_B,
    ),
    Rule(
        Kind.WAIT_F,
        "wait for the output's send",
        Lane.WAIT,
        needs=(Need((Kind.SEND_F,)),),
        releases=(Held.MESSAGE,),
        neighbour=Neighbour.NEXT,
        in_evaluation=True,
    ),
    Rule(
        Kind.WAIT_B,
        "wait for the gradient's send",
        Lane.WAIT,
        needs=(Need((Kind.SEND_B,)),),
        releases=(Held.MESSAGE,),
        neighbour=Neighbour.PREVIOUS,
    ),
    Rule(
        Kind.BCAST_S,
        "broadcast of the last hidden states",
        Lane.COLLECTIVE,
        needs=(Need((Kind.FORWARD,), Source.LAST),),
        where=Where.SHARD,
        in_evaluation=True,
        cost=Cost.COLLECTIVE,
        option="vocab_parallel",
    ),
    Rule(
        Kind.LOGITS,
        "logits of a shard",
        Lane.COMPUTE,
        needs=(Need((Kind.BCAST_S,)),),
        acquires=(Held.LOGITS,),
        where=Where.SHARD,
        in_evaluation=True,
        cost=Cost.PASS,
        colour="#CC79A7",
        option="vocab_parallel",
    ),
    Rule(
        Kind.GATHER_S,
        "exchange of the logits' statistics",
        Lane.COLLECTIVE,
        needs=(Need((Kind.LOGITS,)),),
        where=Where.SHARD,
        in_evaluation=True,
        cost=Cost.COLLECTIVE,
        option="vocab_parallel",
    ),
    Rule(
        Kind.LOSS,
        "loss",
        Lane.COMPUTE,
        needs=(Need((Kind.GATHER_S,)),),
        where=Where.LOSS,
        in_evaluation=True,
        cost=Cost.PASS,
        colour="#000000",
        option="vocab_parallel",
    ),
    Rule(
        Kind.LOGITS_INPUT,
        "shard's part of the last hidden states' gradient",
        Lane.COMPUTE,
        needs=(Need((Kind.GATHER_S,)),),
        where=Where.SHARD,
        cost=Cost.PASS,
        colour="#D55E00",
        legend="their input gradient",
        option="vocab_parallel",
    ),
    Rule(
        Kind.REDUCE_SI,
        "sum of the last hidden states' gradient",
        Lane.COLLECTIVE,
        needs=(Need((Kind.LOGITS_INPUT,)),),
        where=Where.SHARD,
        cost=Cost.COLLECTIVE,
        option="vocab_parallel",
    ),
    Rule(
        Kind.BCAST_SW,
        "broadcast of the loss's gradient",
        Lane.COLLECTIVE,
        needs=(Need((Kind.LOSS,)),),
        where=Where.SHARD,
        cost=Cost.COLLECTIVE,
        option="vocab_parallel",
    ),
    Rule(
        Kind.LOGITS_WEIGHT,
        "gradient of the output layer's shard",
        Lane.COMPUTE,
        needs=(Need((Kind.LOGITS_INPUT,)), Need((Kind.BCAST_SW,))),
        releases=(Held.LOGITS,),
        where=Where.SHARD,
        adds_to_gradients=True,
        cost=Cost.PASS,
        colour="#0072B2",
        legend="their weight gradient",
        option="vocab_parallel",
    ),
    Rule(
        Kind.BCAST_E,
        "broadcast of the tokens",
        Lane.COLLECTIVE,
        where=Where.SHARD,
        in_evaluation=True,
        reads_data=True,  # this pass reads the data in place of the first stage's F
        cost=Cost.COLLECTIVE,
        option="vocab_parallel",
    ),
    Rule(
        Kind.EMBEDDING,
        "lookup in a shard",
        Lane.COMPUTE,
        needs=(Need((Kind.BCAST_E,)),),
        where=Where.SHARD,
        in_evaluation=True,
        cost=Cost.PASS,
        colour="#F0E442",
        legend="embedding shard",
        option="vocab_parallel",
    ),
    Rule(
        Kind.REDUCE_E,
        "sum of the embeddings",
        Lane.COLLECTIVE,
        needs=(Need((Kind.EMBEDDING,)),),
        where=Where.SHARD,
        in_evaluation=True,
        cost=Cost.COLLECTIVE,
        option="vocab_parallel",
    ),
    Rule(
        Kind.BCAST_EW,
        "broadcast of the embeddings' gradient",
        Lane.COLLECTIVE,
        needs=(Need((Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD), Source.FIRST),),
        where=Where.SHARD,
        cost=Cost.COLLECTIVE,
        option="vocab_parallel",
    ),
    Rule(
        Kind.EMBEDDING_WEIGHT,
        "gradient of the embedding's shard",
        Lane.COMPUTE,
        needs=(Need((Kind.BCAST_EW,)), Need((Kind.EMBEDDING,))),
        where=Where.SHARD,
        adds_to_gradients=True,
        cost=Cost.PASS,
        colour="#7A4A1E",
        legend="its gradient",
        option="vocab_parallel",
    ),
    Rule(
        Kind.WAIT_S,
        "wait for the exchange of the logits' statistics",
        Lane.WAIT,
        needs=(Need((Kind.GATHER_S,)),),
        where=Where.GIVER,
        in_evaluation=True,
        option="vocab_parallel",
    ),
    Rule(
        Kind.WAIT_SI,
        "wait for the sum of the last hidden states' gradient",
        Lane.WAIT,
        needs=(Need((Kind.REDUCE_SI,)),),
        where=Where.GIVER,
        option="vocab_parallel",
    ),
    Rule(
        Kind.WAIT_E,
        "wait for the sum of the embeddings",
        Lane.WAIT,
        needs=(Need((Kind.REDUCE_E,)),),
        where=Where.GIVER,
        in_evaluation=True,
        option="vocab_parallel",
    ),
    Rule(
        Kind.OFFLOAD_F,
        "copy of the activation to the host",
        Lane.TO_HOST,
        needs=(Need((Kind.FORWARD,)),),
        moves=(Held.ACTIVATION,),
        all_or_none=Held.ACTIVATION,
        cost=Cost.COPY,
        option="activation_offload",
    ),
    Rule(
        Kind.FREE_F,
        "wait for the activation's copy to the host",
        Lane.WAIT,
        needs=(Need((Kind.OFFLOAD_F,)),),
        releases=(Held.ACTIVATION,),
        all_or_none=Held.ACTIVATION,
        option="activation_offload",
    ),
    Rule(
        Kind.RELOAD_F,
        "copy of the activation from the host",
        Lane.FROM_HOST,
        needs=(Need((Kind.FREE_F,)),),
        acquires=(Held.ACTIVATION,),
        moves=(Held.ACTIVATION,),
        all_or_none=Held.ACTIVATION,
        cost=Cost.COPY,
        option="activation_offload",
    ),
    Rule(
        Kind.OFFLOAD_I,
        "copy of what W needs to the host",
        Lane.TO_HOST,
        needs=(Need((Kind.BACKWARD_INPUT,)),),
        moves=(Held.WEIGHT_INPUTS,),
        all_or_none=Held.WEIGHT_INPUTS,
        cost=Cost.COPY,
        option="activation_offload",
    ),
    Rule(
        Kind.FREE_I,
        "wait for that copy to the host",
        Lane.WAIT,
        needs=(Need((Kind.OFFLOAD_I,)),),
        releases=(Held.WEIGHT_INPUTS,),
        all_or_none=Held.WEIGHT_INPUTS,
        option="activation_offload",
    ),
    Rule(
        Kind.RELOAD_I,
        "copy of what W needs from the host",
        Lane.FROM_HOST,
        needs=(Need((Kind.FREE_I,)),),
        acquires=(Held.WEIGHT_INPUTS,),
        moves=(Held.WEIGHT_INPUTS,),
        all_or_none=Held.WEIGHT_INPUTS,
        cost=Cost.COPY,
        option="activation_offload",
    ),
    Rule(
        Kind.RECV_P,
        "receive of the partial validation state",
        Lane.RECEIVE,
        neighbour=Neighbour.PREVIOUS,
        partner=Kind.SEND_P,
        where=Where.RANK,
        by_optimizer=True,
        option="steps_overlap",
    ),
    Rule(
        Kind.STEP,
        "optimizer step on the partial state",
        Lane.WAIT,
        needs=(Need((Kind.RECV_P,)),),
        where=Where.RANK,
        by_optimizer=True,
        legend="optimizer step",
        marker="v",
        option="steps_overlap",
    ),
    Rule(
        Kind.SEND_P,
        "send of the partial validation state",
        Lane.SEND,
        needs=(Need((Kind.STEP,)),),
        neighbour=Neighbour.NEXT,
        partner=Kind.RECV_P,
        where=Where.RANK,
        by_optimizer=True,
        option="steps_overlap",
    ),
    Rule(
        Kind.RECV_V,
        "receive of the last step's verdict",
        Lane.RECEIVE,
        neighbour=Neighbour.NEXT,
        partner=Kind.SEND_V,
        where=Where.RANK,
        option="steps_overlap",
    ),
    Rule(
        Kind.SETTLE,
        "wait for the last step's verdict",
        Lane.WAIT,
        needs=(Need((Kind.RECV_V,)),),
        where=Where.RANK,
        legend="verdict on the last step",
        marker="o",
        option="steps_overlap",
    ),
    Rule(
        Kind.SEND_V,
        "send of the last step's verdict",
        Lane.SEND,
        needs=(Need((Kind.RECV_V,)),),
        neighbour=Neighbour.PREVIOUS,
        partner=Kind.RECV_V,
        where=Where.RANK,
        option="steps_overlap",
    ),
)

RULES: Mapping[Kind, Rule] = MappingProxyType({rule.kind: rule for rule in _ROWS})
