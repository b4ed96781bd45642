"""Order in which Transformer Engine captures a rank's CUDA graphs, and its check.

Its `make_graphed_callables` takes an order of chunks: c is a forward pass of chunk c (counted from
1), -c a backward pass. Microbatches are counted: the k-th c uses graph k. The graphs share memory
on the assumption that they always run in this order: a backward pass gives the input buffers of its
chunk's oldest forward pass to the next forward passes. Neither Transformer Engine nor Megatron
checks that assumption: `check_capture` does, with the same arithmetic.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from math import floor

from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.kinds import RULES, Where


def graphed_passes(row: Sequence[Action]) -> list[Action]:
    """Return the passes of ``row`` that run modules captured in CUDA graphs.

    They are forward passes (F), and input-gradient passes (I) or full backward passes (B). A
    captured module has no separate weight-gradient pass.
    """
    return [
        action
        for action in row
        if RULES[action.kind].where is Where.STAGE
        and {Kind.FORWARD, Kind.BACKWARD_INPUT} & set(RULES[action.kind].covers)
    ]


def capture_order(row: Sequence[Action], stages: Sequence[int]) -> list[int]:
    """Return the order in which CUDA graphs are captured for a rank's ``row``.

    An entry c is a forward pass of the rank's chunk c (counted from 1), -c a backward pass.
    ``stages`` are the stages of the chunks.
    """
    chunk_of = {stage: chunk for chunk, stage in enumerate(stages, start=1)}
    return [
        chunk_of[action.stage] if action.kind is Kind.FORWARD else -chunk_of[action.stage]
        for action in graphed_passes(row)
    ]


def check_capture(
    order: Sequence[float],
    row: Sequence[Action],
    stages: Sequence[int],
    layers: Sequence[int] | None = None,
) -> None:
    """Refuse an ``order`` from which Transformer Engine would make wrong graphs.

    Args:
        order: the order that Transformer Engine is given (its ``_order``).
        row: the actions of the rank.
        stages: the stages of the rank's chunks.
        layers: number of captured layers in each chunk; one each by default.

    Raises:
        ValueError: a pass would run another microbatch's graph, or a graph whose buffers another
            microbatch has overwritten; the message names the pass.
    """
    passes = graphed_passes(row)
    _check_graphs(order, passes, stages)
    check_buffers(order, passes, stages, layers or [1] * len(stages))


def _check_graphs(order: Sequence[float], passes: Sequence[Action], stages: Sequence[int]) -> None:
    """Raise ValueError unless ``order`` captures a graph for each of ``passes``, in their order.

    Transformer Engine takes the n-th graph of a chunk for the one of microbatch n.
    """
    for entry in order:
        if entry % 1:
            raise ValueError(
                f"the order of CUDA graph capture has {entry}, a separate weight gradient, which "
                "Transformer Engine would attribute to the chunk's latest backward pass: "
                "captured modules must have whole backward passes"
            )
    if len(order) != len(passes):
        raise ValueError(
            f"the order of CUDA graph capture has {len(order)} entries, and the rank runs "
            f"{len(passes)} passes"
        )
    counted: dict[float, int] = defaultdict(int)
    for entry, action in zip(order, passes, strict=True):
        chunk = stages.index(action.stage) + 1
        runs = chunk if action.kind is Kind.FORWARD else -chunk
        if entry != runs:
            raise ValueError(
                f"the order of CUDA graph capture has {entry:g} where the rank runs {action} in "
                f"chunk {chunk}: graphs would share memory that both passes need"
            )
        if counted[entry] != action.microbatch:
            raise ValueError(
                f"{action} is number {counted[entry]} among the passes of its kind on stage "
                f"{action.stage}, so Transformer Engine would capture its CUDA graph as that of "
                f"microbatch {counted[entry]}: run microbatches in order"
            )
        counted[entry] += 1
    for chunk, stage in enumerate(stages, start=1):
        if counted[chunk] != counted[-chunk]:
            raise ValueError(
                f"stage {stage} has {counted[chunk]} forward passes and {counted[-chunk]} "
                "backward passes, since its layers and all layers before them are frozen; CUDA "
                "graphs of Transformer Engine require as many backward as forward passes: "
                "unfreeze a layer of this stage or of an earlier one"
            )


def check_buffers(
    order: Sequence[float], passes: Sequence[Action], stages: Sequence[int], layers: Sequence[int]
) -> None:
    """Raise ValueError if a pass finds its input buffers overwritten since its forward pass."""
    buffer_of = input_buffers(order, layers)
    written: dict[int, Action] = {}
    for action in passes:
        chunk = stages.index(action.stage)
        for layer in range(layers[chunk]):
            buffer = buffer_of[chunk, action.microbatch, layer]
            if action.kind is Kind.FORWARD:
                written[buffer] = action
            elif (by := written[buffer])[::2] != action[::2]:
                raise ValueError(
                    f"CUDA graphs: {by} would overwrite the input buffers of microbatch "
                    f"{action.microbatch} before {action} has read them"
                )


def input_buffers(order: Sequence[float], layers: Sequence[int]) -> dict[tuple[int, int, int], int]:
    """Return the input buffer of each (chunk, microbatch, layer), microbatches counted per chunk.

    This repeats Transformer Engine's allocation for graphs of one shape: a backward pass frees one
    buffer per layer of its chunk, those of the oldest forward pass, and the next forward pass takes
    the first free ones.
    """
    buffers: dict[tuple[int, int, int], int] = {}
    waiting: dict[int, deque[int]] = defaultdict(deque)
    free: deque[int] = deque()
    begun: dict[int, int] = defaultdict(int)
    for entry in order:
        chunk = floor(abs(entry)) - 1
        if entry < 0:
            for _ in range(layers[chunk]):
                free.append(waiting[chunk].popleft())
            continue
        for layer in range(layers[chunk]):
            buffer = free.popleft() if free else len(set(buffers.values()))
            buffers[chunk, begun[chunk], layer] = buffer
            waiting[chunk].append(buffer)
        begun[chunk] += 1
    return buffers
