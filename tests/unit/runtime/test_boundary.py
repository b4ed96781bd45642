"""Tests of the shapes of messages between stages."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.runtime.messages.transport import Boundary
from megatron_ext.schedule.action import Action, Kind, Slice


@pytest.mark.parametrize(
    ("stage", "kind", "length"),
    [
        (0, Kind.SEND_F, 4),
        (1, Kind.RECV_F, 4),
        (1, Kind.SEND_B, 4),
        (0, Kind.RECV_B, 4),
        (1, Kind.SEND_F, 12),
        (2, Kind.RECV_F, 12),
        (2, Kind.SEND_B, 12),
        (1, Kind.RECV_B, 12),
    ],
)
def test_messages_behind_multi_token_prediction_have_its_hidden_states(
    stage: int, kind: Kind, length: int
) -> None:
    """With multi-token prediction, messages contain the hidden states of its depths, two of which
    are computed on stage 1 of 3."""
    boundary = Boundary((4, 2, 8), torch.float32, states=(1, 3, 3))
    assert boundary.shape_of(Action(stage, kind, 5)) == (length, 2, 8)


def test_a_slice_has_its_part_of_each_hidden_state() -> None:
    boundary = Boundary((4, 2, 8), torch.float32, lengths=(3, 1), states=(2, 2))
    sent = Action(0, Kind.SEND_F, Slice(5, 1, (0.75, 1.0)))
    assert boundary.shape_of(sent) == (2, 2, 8)
