"""Microbatches in another order within one call of a schedule, for callers with own batches.

Megatron's loader can be told an order, but callers such as verl make their batches themselves.
Their call of a schedule function is wrapped: the microbatches of a training step are read before
its first pass, arranged by their cost, and the results come back in the order of arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ext.schedule.dealing import small_ends

ScheduleFunction = Callable[..., Any]
MicrobatchCost = Callable[[Any], float]


def order_microbatches(
    forward_backward: ScheduleFunction, cost: MicrobatchCost
) -> ScheduleFunction:
    """Return a schedule function that runs a step's most costly microbatches in the middle.

    ``forward_backward`` is Megatron's schedule function. A call reads its ``num_microbatches``
    items from each iterator before its first pass, and holds them in host memory. The ranks of a
    replica agree, collectively, on the order of the first rank that has data. Results come back in
    the order of arrival. With ``forward_only`` nothing changes.

    Args:
        cost: returns the cost of an item of the iterator in any unit: tokens, or squared lengths.
    """

    def call(*arguments: Any, **keywords: Any) -> Any:
        if arguments or keywords.get("forward_only"):
            return forward_backward(*arguments, **keywords)
        number: int = keywords["num_microbatches"]
        read = _microbatches(keywords)
        microbatches = next((items for items in read if items is not None), None)
        costs = None if microbatches is None else [float(cost(item)) for item in microbatches]
        agreed = _of_first(costs, keywords.get("pg_collection"))
        if agreed is None:  # no rank has read a batch, so nothing can be ordered
            return forward_backward(**keywords)
        order = small_ends(np.array(agreed)).tolist()
        results = forward_backward(**_arranged(keywords, read, order))
        if not isinstance(results, list) or len(results) != number:
            return results  # a stage without loss returns no list with one result per microbatch
        by_arrival = dict(zip(order, results, strict=True))
        return [by_arrival[place] for place in range(number)]

    return call


def reversed_microbatches(forward_backward: ScheduleFunction) -> ScheduleFunction:
    """Return a schedule function that runs each training step's microbatches in reverse order.

    So all sums over microbatches are added in another order. ``forward_backward`` is Megatron's
    schedule function. A call reads its ``num_microbatches`` items from each iterator before its
    first pass. Its results are in the order of the passes.
    """

    def call(**keywords: Any) -> Any:
        if keywords.get("forward_only"):
            return forward_backward(**keywords)
        backwards = range(keywords["num_microbatches"])[::-1]
        return forward_backward(**_arranged(keywords, _microbatches(keywords), backwards))

    return call


def _microbatches(keywords: Mapping[str, Any]) -> list[list[Any] | None]:
    """Read a call's microbatches from each of its data iterators; None for a missing iterator.

    ``keywords`` are those of a schedule function's call.
    """
    given, number = keywords["data_iterator"], keywords["num_microbatches"]
    iterators = given if isinstance(given, list) else [given]
    return [
        None if iterator is None else [next(iterator) for _ in range(number)]
        for iterator in iterators
    ]


def _arranged(
    keywords: Mapping[str, Any], read: Sequence[list[Any] | None], order: Sequence[int]
) -> dict[str, Any]:
    """Return ``keywords`` of a call, with the ``read`` microbatches in ``order``.

    The call is one of a schedule function.
    """
    arranged = [
        None if items is None else iter([items[place] for place in order]) for items in read
    ]
    is_list = isinstance(keywords["data_iterator"], list)
    return {**keywords, "data_iterator": arranged if is_list else arranged[0]}


def _of_first(costs: list[float] | None, groups: Any) -> list[float] | None:
    """Return the microbatch ``costs`` of this replica's first rank that has read data.

    Collective over the pipeline, then over the ranks that share its stages.
    """
    if groups is None:
        members = [
            parallel_state.get_pipeline_model_parallel_group(),
            parallel_state.get_tensor_and_context_parallel_group(),
        ]
    else:
        members = [groups.pp, groups.tp, groups.cp]
    for group in members:
        if group.size() > 1:
            gathered: list[Any] = [None] * group.size()
            dist.all_gather_object(gathered, costs, group=group)
            costs = next((one for one in gathered if one is not None), None)
    return costs
