"""Tests of the keys and values of slices in one buffer: gradients are those of autograd, and
nothing is stored twice."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from megatron_ext.runtime.slices.running_slice import RunningSlice, Span, spans  # noqa: E402

TOKENS, WIDTH = 16, 3


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the attention of each query to all keys up to its own position, if the last query is
    at the last key."""
    scores = query @ key.T
    visible = torch.ones_like(scores).tril(len(key) - len(query)).bool()
    return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ value


def draw(*names: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = TOKENS, WIDTH
    return {n: torch.randn(shape, generator=generator, dtype=torch.float64) for n in names}


@pytest.mark.parametrize("lengths", [(16,), (4, 4, 4, 4), (7, 5, 3, 1)])
@pytest.mark.parametrize("runs_again", [False, True])
def test_slices_have_the_gradients_of_the_whole(lengths: Sequence[int], runs_again: bool) -> None:
    """Slices have the gradients of the whole sequence, for two microbatches through two layers. A
    recomputed pass writes the same values as before."""
    drawn = draw("query", "key", "value", "gradient")
    whole = {name: tensor.clone().requires_grad_() for name, tensor in drawn.items()}
    out = attend(attend(whole["query"], whole["key"], whole["value"]), whole["key"], whole["value"])
    out.backward(drawn["gradient"])

    running = RunningSlice()
    sliced = {name: tensor.clone().requires_grad_() for name, tensor in drawn.items()}

    def forward(microbatch: int, span: Span) -> Tensor:
        part = {name: tensor[span.begin : span.end] for name, tensor in sliced.items()}
        with running.running(0, microbatch, span):
            hidden = part["query"]
            for layer in ("first", "second"):
                key, value = running.attended(layer, (part["key"], part["value"]))
                hidden = attend(hidden, key, value)
        return hidden

    pieces = [(microbatch, span) for microbatch in range(2) for span in spans(lengths)]
    made = {}
    for microbatch, span in pieces:
        with torch.set_grad_enabled(not runs_again):
            made[microbatch, span] = forward(microbatch, span)
    for microbatch in range(2):
        for span in reversed(spans(lengths)):
            dy = drawn["gradient"][span.begin : span.end]
            y = forward(microbatch, span) if runs_again else made.pop((microbatch, span))
            y.backward(dy)
        running.drop(0, microbatch)
    assert running.is_empty
    for name in ("query", "key", "value"):
        expected = whole[name].grad
        assert expected is not None
        torch.testing.assert_close(sliced[name].grad, 2 * expected)


def test_what_autograd_holds_does_not_depend_on_their_number() -> None:
    """The memory that autograd stores does not depend on the number of slices. If keys and values
    were concatenated for each slice, 8 slices would store them 4.5 times."""

    def held(number: int) -> int:
        running, saved = RunningSlice(), {}
        drawn = {name: tensor.requires_grad_() for name, tensor in draw("key", "value").items()}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        outputs = []
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            for span in spans([TOKENS // number] * number):
                own = tuple(tensor[span.begin : span.end] for tensor in drawn.values())
                with running.running(0, 0, span):
                    key, value = running.attended("layer", own)
                outputs.append((key * value).sum())  # this product saves both factors
        return sum(saved.values())

    assert {held(number) for number in (1, 2, 4, 8)} == {2 * TOKENS * WIDTH * 8}


def test_a_restarted_step_stores_nothing() -> None:
    running = RunningSlice()
    (span, _) = spans([8, 8])
    with running.running(0, 0, span):
        running.attended("layer", (torch.ones(8, 1),))
    assert not running.is_empty
    running.clear()
    assert running.is_empty and running.span is None
