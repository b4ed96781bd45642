"""Tests of weight gradients of all slices of a microbatch, computed as one product over the rows of
all slices."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from megatron_ext.runtime.weight_gradients import RowProduct, WeightGradients

SLICES = (4, 5, 6)  # numbers of the slices of a microbatch, in the order of the sequence


def filled(waiting: WeightGradients, weights: list[Tensor], made: list[int]) -> list[Tensor]:
    """Queue gradients of ``weights`` for each slice, the last one first, and return their expected
    sums. The number of rows of each product is appended to ``made``."""
    expected = [torch.zeros_like(weight) for weight in weights]
    for number in reversed(SLICES):
        with waiting.collecting(0, number):
            for weight, total in zip(weights, expected, strict=True):
                dy, x = torch.randn(number, weight.shape[0]), torch.randn(number, weight.shape[1])
                total += dy.t() @ x

                def product(dy: Tensor, x: Tensor) -> Tensor:
                    made.append(len(x))
                    return dy.t() @ x

                waiting.put(
                    weight, RowProduct(partial(lambda *both: both, dy, x), product), (dy, x)
                )
    return expected


def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(2, 3))


def test_a_weight_has_one_product_over_the_rows_of_all_slices() -> None:
    waiting, made = WeightGradients(), list[int]()
    weights = [weight(), weight()]
    expected = filled(waiting, list(weights), made)
    waiting.run_joined(0, SLICES)
    assert made == [sum(SLICES)] * 2 and not len(waiting)
    for one, total in zip(weights, expected, strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad, total)


def test_a_weight_that_is_used_twice_has_a_product_for_each_use() -> None:
    waiting, made, shared = WeightGradients(), list[int](), weight()
    expected = filled(waiting, [shared, shared], made)
    waiting.run_joined(0, SLICES)
    assert made == [sum(SLICES)] * 2
    assert shared.grad is not None
    torch.testing.assert_close(shared.grad, expected[0] + expected[1])


def test_other_gradients_are_added_one_after_the_other() -> None:
    """Weight gradients that cannot be computed as one product over the rows of all slices are added
    one after the other. In a quantised layer the rows of each slice have scales of their own."""
    waiting, order, quantised = WeightGradients(), list[int](), weight()

    def compute(number: int) -> Tensor:
        order.append(number)
        return torch.full((2, 3), float(number))

    for number in reversed(SLICES):
        with waiting.collecting(0, number):
            waiting.put(quantised, partial(compute, number), ())
    waiting.run_joined(0, SLICES)
    assert order == [6, 5, 4]
    assert quantised.grad is not None and quantised.grad.unique().tolist() == [15.0]


def test_inputs_of_all_slices_are_gathered_before_their_product() -> None:
    """With sequence parallelism, the input of each slice is gathered before its product, while the
    product before it runs."""
    waiting, events = WeightGradients(), list[str]()

    def operand(name: str) -> tuple[Tensor]:
        events.append(f"wait {name}")
        return (torch.ones(1, 3),)

    def product(x: Tensor) -> Tensor:
        events.append(f"product of {len(x)}")
        return x.expand(2, 3) if len(x) == 1 else x[:2]

    weights = {name: weight() for name in "ab"}
    for number in (1, 0):
        with waiting.collecting(0, number):
            for name, one in weights.items():
                said = f"{name}{number}"
                rows = RowProduct(partial(operand, said), product)
                waiting.put(one, rows, (), partial(events.append, f"gather {said}"))
    waiting.run_joined(0, (0, 1))
    assert events == [
        *("gather a0", "gather a1", "gather b0", "gather b1"),
        *("wait a0", "wait a1", "product of 2", "wait b0", "wait b1", "product of 2"),
    ]
