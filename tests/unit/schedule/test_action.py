"""Tests of the text form of actions, and of the table of kinds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.schedule.action import Action, Kind, parse_action
from megatron_ext.schedule.kinds import RULES, Lane
from megatron_ext.schedule.placement import Neighbour
from tests.helpers.random_schedules import PROPERTY

TEXTS = {
    Kind.FORWARD: "3F7",
    Kind.BACKWARD_INPUT: "3I7",
    Kind.BACKWARD_WEIGHT: "3W7",
    Kind.FULL_BACKWARD: "3B7",
    Kind.RECOMPUTE: "3R7",
    Kind.SEND_F: "3SEND_F7",
    Kind.RECV_F: "3RECV_F7",
    Kind.SEND_B: "3SEND_B7",
    Kind.RECV_B: "3RECV_B7",
    Kind.WAIT_F: "3WAIT_F7",
    Kind.WAIT_B: "3WAIT_B7",
    Kind.LOGITS: "3S7",
    Kind.LOGITS_INPUT: "3SI7",
    Kind.LOGITS_WEIGHT: "3SW7",
    Kind.LOSS: "3L7",
    Kind.EMBEDDING: "3E7",
    Kind.EMBEDDING_WEIGHT: "3EW7",
    Kind.BCAST_S: "3BCAST_S7",
    Kind.GATHER_S: "3GATHER_S7",
    Kind.REDUCE_SI: "3REDUCE_SI7",
    Kind.BCAST_SW: "3BCAST_SW7",
    Kind.BCAST_E: "3BCAST_E7",
    Kind.REDUCE_E: "3REDUCE_E7",
    Kind.BCAST_EW: "3BCAST_EW7",
    Kind.WAIT_S: "3WAIT_S7",
    Kind.WAIT_SI: "3WAIT_SI7",
    Kind.WAIT_E: "3WAIT_E7",
    Kind.OFFLOAD_F: "3OFFLOAD_F7",
    Kind.FREE_F: "3FREE_F7",
    Kind.RELOAD_F: "3RELOAD_F7",
    Kind.OFFLOAD_I: "3OFFLOAD_I7",
    Kind.FREE_I: "3FREE_I7",
    Kind.RELOAD_I: "3RELOAD_I7",
    Kind.RECV_P: "3RECV_P7",
    Kind.STEP: "3STEP7",
    Kind.SEND_P: "3SEND_P7",
    Kind.RECV_V: "3RECV_V7",
    Kind.SETTLE: "3SETTLE7",
    Kind.SEND_V: "3SEND_V7",
}


@pytest.mark.parametrize("kind", Kind)
def test_text_form(kind: Kind) -> None:
    action = Action(3, kind, 7)
    assert str(action) == TEXTS[kind]
    assert parse_action(TEXTS[kind]) == action
    assert isinstance(parse_action(TEXTS[kind]).kind, Kind)


@PROPERTY
@given(st.builds(Action, st.integers(0, 10**6), st.sampled_from(Kind), st.integers(0, 10**6)))
def test_parse_is_the_inverse_of_str(action: Action) -> None:
    assert parse_action(str(action)) == action


def test_parse_forgives_space_around_a_cell() -> None:
    assert parse_action(" 3F7\t") == Action(3, Kind.FORWARD, 7)


@pytest.mark.parametrize(
    "text",
    ["", "F", "3F", "F7", "3f7", "3X7", "3FF7", "3SEND7", "-3F7", "3F-7", "3F7F", "3 F 7", "3F7,"],
)
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ValueError) as refusal:
        parse_action(text)
    message = str(refusal.value)
    assert repr(text) in message
    assert "as in 3F7" in message


def test_every_kind_has_its_row() -> None:
    assert RULES.keys() == set(Kind)


def test_a_kind_covers_itself_but_for_b() -> None:
    for kind, rule in RULES.items():
        both = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        assert rule.covers == (both if kind is Kind.FULL_BACKWARD else (kind,))
        assert all(RULES[part].covers == (part,) for part in rule.covers)
        assert rule.adds_to_gradients == any(RULES[k].adds_to_gradients for k in rule.covers)
        assert rule.in_evaluation == all(RULES[k].in_evaluation for k in rule.covers)


@pytest.mark.parametrize("kind", [kind for kind in Kind if RULES[kind].is_message])
def test_messages_have_two_ends(kind: Kind) -> None:
    rule = RULES[kind]
    assert rule.partner is not None
    other = RULES[rule.partner]
    assert other.partner is kind
    assert {rule.neighbour, other.neighbour} == set(Neighbour)
    assert {rule.lane, other.lane} == {Lane.SEND, Lane.RECEIVE}


def test_what_is_taken_is_given_back() -> None:
    """Memory that passes allocate is freed: a microbatch leaves none allocated, whether its
    backward is one pass or two."""
    for backward in ([Kind.FULL_BACKWARD], [Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT]):
        rules = [RULES[kind] for kind in (Kind.FORWARD, *backward)]
        taken = [held for rule in rules for held in rule.acquires]
        assert sorted(h.name for h in taken) == sorted(h.name for r in rules for h in r.releases)
