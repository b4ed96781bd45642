"""Tests of `Costs` and its parts: nothing is lost when costs are joined or changed.

Costs used to be rebuilt field by field, and lost messages, latencies, overlap and more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest

from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs import (
    Costs,
    HostCosts,
    LinkCosts,
    OverlapCosts,
    PassCosts,
    SliceCosts,
    TowerCosts,
    VocabularyCosts,
)
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.placement import Placement, line, loop, v
from scripts.benchmarks.emulated import in_seconds

F, I, W = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741
_PLAIN = Costs(PassCosts({F: (1.0,) * 4, I: (1.0,) * 4, W: (1.0,) * 4}))

# Every field of every part is set to something other than its default.
FULL = Costs(
    PassCosts(
        {F: (10.0, 2.0, 4.0, 16.0), I: (8.0, 4.0, 8.0, 16.0), W: (9.0, 6.0, 4.0, 16.0)},
        held_bytes={
            Held.ACTIVATION: (4.0, 8.0, 8.0, 20.0),
            Held.WEIGHT_INPUTS: (2.0, 4.0, 4.0, 14.0),
        },
        recompute=(10.0, 2.0, 4.0, 16.0),
        fused_backward_saving=(0.25, 0.5, 0.75, 1.0),
    ),
    LinkCosts(
        2.0,
        latency=0.5,
        p2p_seconds_by_stage=(1.0, 2.0, 3.0),
        latencies=(0.25, 0.5, 0.75),
        message_bytes=64.0,
        states=(1, 1, 2),
    ),
    SliceCosts(
        attention=(0.25, 0.5, 0.5, 0.25),
        fixed={F: (0.125, 0.25, 0.375, 0.5), W: (1.0, 2.0, 3.0, 4.0)},
        keys_values=(1.0, 2.0, 3.0, 4.0),
        sharing=2,
        joined_weights=True,
    ),
    HostCosts(
        {
            Kind.OFFLOAD_F: (2.0, 4.0, 4.0, 10.0),
            Kind.OFFLOAD_I: (1.0, 2.0, 2.0, 7.0),
            Kind.RELOAD_F: (2.0, 4.0, 4.0, 10.0),
            Kind.RELOAD_I: (1.0, 2.0, 2.0, 7.0),
        },
        ranks_per_link=2,
        duplex=False,
    ),
    VocabularyCosts(
        output_layer=(8.0, 8.0, 8.0),
        embedding=(2.0, 1.0),
        logits_bytes=4.0,
        deferred_bytes=3.0,
        launch=0.5,
        rescaling=1.0,
        contention=(0.25, 0.125),
        fixed_output_layer=(0.25, 0.0, 2.0),
        fixed_embedding=(0.0625, 0.5),
    ),
    OverlapCosts(
        {
            I: tuple(tuple(f + b / 4 for b in range(4)) for f in range(1, 5)),
            Kind.FULL_BACKWARD: tuple(tuple(f + b / 8 for b in range(4)) for f in range(1, 5)),
        }
    ),
    unpartitioned=_PLAIN,
    slowness=(1.0, 1.0, 2.0, 2.0),
    tower=TowerCosts((3.0, 2.0, 1.0), 2.0),
    at_places={F: (0.5, 1.5), I: (0.75, 1.25)},
    origin="here",
    no_estimate="its attention is not known",
)


def _defaults(part: Any, name: str = "costs") -> Iterator[str]:
    """Yield the fields of ``part``, and of parts in it, that have their default."""
    for entry in fields(part):
        value = getattr(part, entry.name)
        default = entry.default
        if default is MISSING and entry.default_factory is not MISSING:
            default = entry.default_factory()
        if value is None or (default is not MISSING and value == default):
            yield f"{name}.{entry.name}"
        elif is_dataclass(value) and entry.name != "unpartitioned":
            yield from _defaults(value, f"{name}.{entry.name}")


def test_full_costs_set_every_field() -> None:
    """`FULL`, the costs of these tests, sets every field. Otherwise the tests would not cover a new
    field."""
    assert not list(_defaults(FULL))


def test_stages_joined_one_by_one_are_the_same() -> None:
    assert FULL.per_rank(line(4)) == FULL


def test_a_v_has_both_ends_of_the_vocabulary_on_one_rank() -> None:
    joined = FULL.per_rank(v(2))
    assert joined.vocabulary is None and joined.stages == 2
    assert joined.seconds[F] == (6.0, 26.0)
    assert joined.links.p2p_seconds_by_stage == (1.0,) and joined.links.latencies == (0.25,)


def test_what_is_joined_is_summed_up_and_links_are_those_between() -> None:
    joined = FULL.per_rank(Placement("neighbours", (0, 0, 1, 1)))
    assert joined.passes == PassCosts(
        {F: (12.0, 20.0), I: (12.0, 24.0), W: (15.0, 20.0)},
        held_bytes={Held.ACTIVATION: (12.0, 28.0), Held.WEIGHT_INPUTS: (6.0, 18.0)},
        recompute=(12.0, 20.0),
        fused_backward_saving=(0.75, 1.75),
    )
    assert joined.links == replace(
        FULL.links, p2p_seconds_by_stage=(2.0,), latencies=(0.5,), states=(1,)
    )
    assert joined.slices == SliceCosts(
        (0.3, 1 / 3), {F: (0.375, 0.875), W: (3.0, 7.0)}, (3.0, 7.0), sharing=2, joined_weights=True
    )
    assert joined.host is not None and joined.host.seconds[Kind.OFFLOAD_I] == (3.0, 9.0)
    assert (joined.host.ranks_per_link, joined.host.duplex) == (2, False)
    assert joined.vocabulary == FULL.vocabulary and joined.origin == "here"
    # the overlaps of F0 F1 with B1 B0, and of F0 F1 with B3 B2
    assert joined.overlap.savings[I][0] == (1 + 1 / 4 + 2, 1 + 3 / 4 + 2 + 2 / 4)
    assert joined.unpartitioned is not None and joined.unpartitioned.seconds[F] == (2.0, 2.0)


def test_a_loop_has_one_link_between_two_ranks() -> None:
    costs = replace(FULL, vocabulary=None)
    assert costs.per_rank(loop(2, vpp=2)).links.p2p_seconds_by_stage == (1.0,)


_TOWER = FULL.tower or TowerCosts((0.0, 0.0, 0.0))
_OF_TOWER = {"passes.seconds", "passes.held_bytes", "passes.recompute", "slices.attention"}
_CHANGES: dict[str, tuple[Callable[[Costs], Costs], set[str]]] = {
    "with_passes": (
        lambda costs: costs.with_passes(fused_backward_saving=(9.0,) * 4),
        {"passes.fused_backward_saving"},
    ),
    "with_links": (lambda costs: costs.with_links(p2p_seconds=9.0), {"links.p2p_seconds"}),
    "without_messages": (
        Costs.without_messages,
        {"links.p2p_seconds", "links.latency", "links.p2p_seconds_by_stage", "links.latencies"},
    ),
    "with_slices": (lambda costs: costs.with_slices(sharing=9), {"slices.sharing"}),
    "with_slices_of": (
        lambda costs: costs.with_slices(attention=(), fixed={}).with_slices_of(
            replace(FULL, vocabulary=None).with_slices(attention=(0.5,) * 4, fixed={F: (0.5,) * 4})
        ),
        {"slices.attention", "slices.fixed", "origin"},
    ),
    "with_slices_shared_by": (
        lambda costs: costs.with_slices_shared_by(3),
        {"slices.sharing", "slices.keys_values", "passes.held_bytes"},
    ),
    "with_host": (
        lambda costs: costs.with_host((9.0,) * 4, (9.0,) * 4, 4),
        {"host.seconds", "host.ranks_per_link", "host.duplex"},
    ),
    "with_copies_of": (
        lambda costs: costs.with_copies_of(replace(FULL, host=replace(FULL.host, duplex=True))),  # type: ignore[type-var]
        {"host.duplex"},
    ),
    "without_vocabulary": (
        lambda costs: costs.without_vocabulary(),
        {
            *("vocabulary", "passes.seconds", "passes.held_bytes", "passes.recompute"),
            "slices.fixed",
        },
    ),
    "with_vocabulary": (
        lambda costs: replace(costs, vocabulary=None).with_vocabulary(FULL.vocabulary),  # type: ignore[arg-type]
        {"passes.seconds", "passes.held_bytes", "passes.recompute", "slices.fixed"},
    ),
    "with_tower": (
        lambda costs: replace(costs, tower=None, slowness=()).with_tower(_TOWER),
        {*_OF_TOWER, "slowness"},
    ),
    "without_tower": (
        lambda costs: replace(costs, slowness=()).without_tower(),
        {*_OF_TOWER, "tower", "slowness"},
    ),
}


def _changed(before: Any, after: Any, name: str = "") -> Iterator[str]:
    for entry in fields(before):
        one, other = getattr(before, entry.name), getattr(after, entry.name)
        has_fields = is_dataclass(one) and is_dataclass(other)
        if one != other and has_fields and entry.name != "unpartitioned":
            yield from _changed(one, other, f"{name}{entry.name}.")
        elif one != other:
            yield f"{name}{entry.name}"


@pytest.mark.parametrize("name", _CHANGES)
def test_a_change_keeps_all_else(name: str) -> None:
    change, expected = _CHANGES[name]
    assert set(_changed(FULL, change(FULL))) == expected


def test_each_way_to_change_costs_is_tried() -> None:
    ways = {name for name in dir(Costs) if name.startswith(("with_", "without_"))}
    assert ways == set(_CHANGES)


def test_arrays_are_refused() -> None:
    """Costs refuse numpy arrays. Caches use the repr of costs as key, and numpy shortens it, so
    that two long arrays would have the same key."""
    for figures in (np.ones(4), [1.0] * 4):
        with pytest.raises(TypeError, match=r"fused_backward_saving is of type .*; write a tuple"):
            FULL.with_passes(fused_backward_saving=figures)
        with pytest.raises(TypeError, match=r"seconds is of type .*; write a tuple"):
            FULL.with_passes(seconds={F: figures})
    assert isinstance(FULL.seconds, Mapping)


def test_costs_of_emulated_runs_keep_all_but_messages() -> None:
    text = (
        "f=1000,i=2000,w=3000,comm=5,r=500,attention=0.5,fixed_f=100,fixed_w=300,overlap_saving=200"
    )
    text += ",d2h=700,output_layer=1/2/3,fixed_output_layer=0/0/2,embedding=0/1,fixed_embedding=0/1"
    made = in_seconds(text, line(2))
    assert made.seconds == {F: (1.0, 1.001), I: (2.0, 2.002), W: (3.001, 3.003)}
    assert made.passes.recompute == (0.5, 0.501) and made.links == LinkCosts()
    assert made.slices == SliceCosts((0.5, 0.5), {F: (0.1, 0.1), W: (0.301, 0.302)})
    assert made.host is not None and made.host.to_host == (0.7, 0.7)
    assert made.vocabulary == VocabularyCosts(
        (0.001, 0.002, 0.003),
        (0.0, 0.001),
        fixed_output_layer=(0.0, 0.0, 0.002),
        fixed_embedding=(0.0, 0.001),
    )
    assert made.overlap == OverlapCosts({I: ((0.2, 0.2), (0.2, 0.2))})
