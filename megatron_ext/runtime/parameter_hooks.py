"""Hooks that autograd runs when it adds a gradient to a parameter.

A caller puts them on the parameter (``register_hook``, ``register_post_accumulate_grad_hook``) or
on its AccumulateGrad node, where they last as long as somebody references the node. Only autograd
runs them: it has to compute the gradient, or to be handed one that was computed elsewhere.

Megatron's data-parallel wrapper has a hook on every node too, which adds to ``main_grad``. It is
not a caller's hook: gradients computed elsewhere are added to ``main_grad`` without it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.weak import WeakIdKeyDictionary

Hook = Callable[..., Any]
# Hooks by the numbers of torch's removable handles, in the order in which the hooks run.
HooksByNumber = dict[int, Hook]

# Qualified name of the method that makes the hooks of Megatron's data-parallel wrapper.
_WRAPPERS_HOOK = "DistributedDataParallel._make_backward_post_hook."


def has_callers_hooks(parameter: Tensor) -> bool:
    """Return whether ``parameter`` or its autograd node has hooks of the caller's.

    Hooks of Megatron's data-parallel wrapper do not count. ``parameter`` is a leaf that requires a
    gradient.
    """
    return any(
        not getattr(hook, "__qualname__", "").startswith(_WRAPPERS_HOOK)
        for table in _tables(parameter)
        for hook in table.values()
    )


def hand_over(gradients: Mapping[Tensor, Tensor]) -> None:
    """Let autograd add ``gradients``, by tensor, in one backward pass that runs all hooks.

    A tensor that is computed from others passes its gradient on to them.
    """
    with torch.enable_grad():
        # Hooks of a tensor run only if an operation that has read the tensor passes a gradient
        # back, so an operation (a view) is added.
        views = [tensor.expand_as(tensor) for tensor in gradients]
    torch.autograd.backward(views, list(gradients.values()))


class SummedGradients:
    """Gradients of parameters with hooks, summed over several backward passes of a microbatch.

    The hooks then run once, on the sum. The sums are in fp32.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self._sums: dict[int, dict[Tensor, Tensor]] = {}

    @contextlib.contextmanager
    def adding(self, microbatch: int) -> Iterator[None]:
        """Context of a backward pass of ``microbatch`` that sums gradients and runs no hook."""
        before = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        with without_hooks(table for each in self._parameters for table in _tables(each)):
            yield
        sums = self._sums.setdefault(microbatch, {})
        for parameter, grad in zip(self._parameters, before, strict=True):
            part, parameter.grad = parameter.grad, grad
            if part is not None:
                sums[parameter] = sums[parameter].add_(part) if parameter in sums else part.float()

    def hand_over(self, microbatch: int) -> None:
        """Let autograd add the sums of ``microbatch`` to the parameters' gradients, with hooks."""
        sums = self._sums.pop(microbatch)
        if sums:
            hand_over({parameter: total.to(parameter.dtype) for parameter, total in sums.items()})

    def clear(self) -> None:
        """Drop all sums of gradients, because the step restarts."""
        self._sums.clear()


@contextlib.contextmanager
def without_hooks(
    tables: Iterable[HooksByNumber], is_kept: Callable[[Hook], bool] = lambda hook: False
) -> Iterator[None]:
    """Context in which torch finds no hooks in ``tables`` but those that ``is_kept`` accepts."""
    hiding = [(table, dict(table)) for table in tables if table]
    for table, hooks in hiding:
        table.clear()
        table.update({number: hook for number, hook in hooks.items() if is_kept(hook)})
    try:
        yield
    finally:
        for table, hooks in hiding:
            added = {number: hook for number, hook in table.items() if number not in hooks}
            table.clear()
            table.update(hooks | added)


def _tables(parameter: Tensor) -> Sequence[HooksByNumber]:
    tables = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return [*(table for table in tables if table), *_tables_of_node(parameter)]


# Tables of the hooks on the autograd node of each parameter; a table lives as long as its node.
_of_nodes: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _tables_of_node(parameter: Tensor) -> list[HooksByNumber]:
    """Return the hooks on the AccumulateGrad node of ``parameter``, before and after it runs.

    Torch gives access to these tables only by the handle of a registered hook.
    """
    known = [reference() for reference in _of_nodes.get(parameter, ())]
    if known and None not in known:
        return known
    node = get_gradient_edge(parameter).node
    tables = []
    for register in (node.register_prehook, node.register_hook):
        handle = register(_nothing)
        table = handle.hooks_dict_ref()
        assert table is not None  # the autograd node keeps its table of hooks alive
        tables.append(table)
        handle.remove()
    _of_nodes[parameter] = [weakref.ref(table) for table in tables]
    return tables


def _nothing(*gradients: Any) -> None:
    pass
