"""Costs of an emulated clock, which are written in milliseconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_ext.schedule.costs import Costs, LinkCosts, OverlapCosts
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.placement import Placement


def in_seconds(costs: str, placement: Placement) -> Costs:
    """Return ``costs``, given in milliseconds, in seconds. Messages cost nothing there, as real
    ones are sent here."""
    given = parse_costs(costs, placement)
    host, vocabulary = given.host, given.vocabulary
    if host is not None:
        host = replace(host, seconds=_in_seconds(host.seconds))
    if vocabulary is not None:
        head, embedding = _in_seconds((vocabulary.head, vocabulary.embedding))
        vocabulary = replace(vocabulary, head=head, embedding=embedding)
    passes, slices = given.passes, given.slices
    return replace(
        given,
        passes=replace(
            passes,
            seconds=_in_seconds(passes.seconds),
            recompute=_in_seconds(passes.recompute),
            spared=_in_seconds(passes.spared),
        ),
        links=LinkCosts(),
        slices=replace(slices, launch=_in_seconds(slices.launch)),
        host=host,
        vocabulary=vocabulary,
        overlap=OverlapCosts(_in_seconds(given.overlap.hidden)),
    )


def _in_seconds(ms: Any) -> Any:
    """Return ``ms``, a figure or tuples and mappings of figures, in seconds."""
    if isinstance(ms, Mapping):
        return {key: _in_seconds(figures) for key, figures in ms.items()}
    return tuple(map(_in_seconds, ms)) if isinstance(ms, tuple) else ms / 1000
