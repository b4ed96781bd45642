"""Transformer Engine's own delayed weight gradients, moved into our queue.

Linear, LayerNormLinear, LayerNormMLP and GroupedLinear can leave their weight gradient to a call of
``backward_dw``: their backward pass then puts it, as tensors and a function, into the module's
`WeightGradStore`. That store is one FIFO per module, and ``backward_dw`` overwrites ``.grad``. Here
the stores of all modules are enabled while a schedule splits the backward pass, and their contents
go into the queue of `weight_gradients` instead, under the stage and microbatch.

Not patched: the layers themselves; ``backward_dw``, which is not called here. Not split: te.ops,
attention, norms, and layers whose operands lie in Userbuffers, where the next layer overwrites
them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_ext.adapter.transformer_engine.installed import can_split
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap
from megatron_ext.runtime.weight_gradients import (
    Contribution,
    Contributions,
    RowProduct,
    Weights,
    accumulate_each,
    add_to_grad,
    queue,
)

_MODULES = "transformer_engine.pytorch.module"

# Prefixes of the attributes of a module's linear layers. LayerNormMLP has two linear layers and one
# store of weight gradients, into which it puts fc2's gradient first.
_PREFIX_OF = {"fc1_wgrad_gemm": "fc1_", "fc2_wgrad_gemm": "fc2_"}

_module_of: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patches that split the backward pass of Transformer Engine's linear layers.

    There are none if Transformer Engine is not installed.
    """
    if not can_split():
        return ()
    return (
        wrap(
            f"{_MODULES}._common:WeightGradStore.delay_wgrad_compute",
            delays,
            reason="a module defers its weight gradient while a schedule splits backward passes",
            signature="(self)",
        ),
        wrap(
            f"{_MODULES}._common:WeightGradStore.put",
            put,
            reason="a module's weight gradient waits for the W pass",
            signature="(self, tensor_list, func)",
        ),
        wrap(
            f"{_MODULES}.base:TransformerEngineBaseModule.prepare_forward",
            remember_module,
            reason="Transformer Engine's store of weight gradients does not know their module",
        ),
    )


def delays(original: Callable[[Any], bool], store: Any) -> bool:
    """Return whether weight gradients of this store are deferred."""
    if not queue.splitting or _comes_at_once(store) or _lies_in_userbuffers(store):
        return original(store)
    from transformer_engine.debug.pytorch.debug_state import TEDebugState

    if TEDebugState.debug_enabled:
        raise ValueError(
            "Transformer Engine's debug mode (nvdlfw_inspect) cannot defer weight gradients: "
            "turn it off, or use a schedule that does not split backward passes, such as 1f1b or "
            "gpipe"
        )
    return True


# Attributes of a module which tell that the input, the output's gradient or the product of a weight
# gradient is in a buffer of Userbuffers. (The last name is LayerNormMLP's for the name before it.)
_IN_USERBUFFERS = ("ub_bulk_dgrad", "ub_bulk_wgrad", "ub_overlap_ag_dgrad", "ub_overlap_ag")


def _reduces(module: Any) -> bool:
    """Return whether ``module`` queues a weight gradient while its input's gradient is reduced."""
    if getattr(module, "ub_overlap_rs_dgrad", False):
        return False  # the input gradient's product includes the reduction, which has ended by then
    return getattr(module, "parallel_mode", None) == "column" and module.tp_size > 1


def _lies_in_userbuffers(store: Any) -> bool:
    module = _remembered(store)
    return any(getattr(module, name, False) for name in _IN_USERBUFFERS)


def remember_module(original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    """Run ``original``, which begins a forward pass of ``module``.

    The module is noted as the owner of its ``wgrad_store``, Transformer Engine's store of deferred
    weight gradients.
    """
    store = getattr(module, "wgrad_store", None)
    if queue.splitting and store is not None:
        _module_of[store] = weakref.ref(module)
    return original(module, *args, **kwargs)


def put(
    original: Callable[..., None], store: Any, tensors: list[Any], function: Callable[..., Any]
) -> None:
    """Put a module's weight gradient, ``function(*tensors)``, into our queue.

    Nothing is copied: in FP8 the queue stores the operands that the input-gradient pass has
    quantised, and fused accumulation stays part of the GEMM. A column-parallel layer calls this
    while the reduction of its input's gradient runs, and then waits for the reduction. Meanwhile
    the queue computes other weight gradients, which hides the reduction.

    ``tensors`` are the layer's input and its output's gradient. For a GroupedLinear they are lists,
    and a third list has the tensors to which ``function`` writes the weights' gradients.
    """
    if not queue.splitting or _comes_at_once(store):
        original(store, tensors, function)
        return
    module = _owner(store)
    hooks = module.wgrad_accumulation_and_reduce_hooks
    x, dy = map(_cut_off, tensors[:2])
    rest = tensors[2:]
    make: Callable[[Any, Any], _Made]
    if rest:
        numbers = range(module.num_gemms)
        weights = _parameters(module, [f"weight{number}" for number in numbers])
        biases = _parameters(module, [f"bias{number}" for number in numbers] * module.use_bias)
        outputs = rest[0]
        written = (lambda: outputs) if module.fuse_wgrad_accumulation else _taken_back(outputs)
        make = partial(_make_grouped, function, written)
    else:
        prefix = _PREFIX_OF.get(function.__name__, "")
        weights = _parameters(module, [f"{prefix}weight"])
        biases = _parameters(module, [f"{prefix}bias"] * module.use_bias)
        x, dy = _in_parts(module, x, dy)
        make = partial(_make, function)
        if _reduces(module):
            queue.compute_meanwhile()
        if prefix == "fc2_" and module.fc1_weight.requires_grad:
            hooks = []  # the gradient of fc1 is added later, and then runs the hooks
    gradient = _Gradient(weights, biases, module.fuse_wgrad_accumulation, make)
    add = partial(_add_before, hooks) if hooks else accumulate_each
    gather = next((part.gather for part in (x, dy) if isinstance(part, _Part)), None)
    compute = _deferred(gradient, x, dy)
    queue.put_together((*weights, *biases), compute, _tensors_in((x, dy)), add, gather)


class _Part:
    """This rank's part of a tensor that was gathered from ``group`` and is gathered again for W.

    With sequence parallelism one operand of a layer's weight gradient has been gathered, and would
    take most of the memory that is stored until W. If W does not follow directly, only the rank's
    own part is stored, and W gathers it again during the previous product. (Quantised operands are
    stored whole.)
    """

    def __init__(self, gathered: Tensor, group: Any) -> None:
        self.tensor = gathered.chunk(group.size())[group.rank()].clone()
        self._shape, self._group = gathered.shape, group
        self._gathered: Tensor | None = None
        self._work: Any = None

    def gather(self) -> None:
        """Start to gather an operand that the ranks have in parts."""
        part = self.tensor
        self._gathered = torch.empty(self._shape, dtype=part.dtype, device=part.device)
        gather = torch.distributed.all_gather_into_tensor
        self._work = gather(self._gathered, part, group=self._group, async_op=True)

    def gathered(self) -> Tensor:
        """Wait for the gathered operand, and return it."""
        self._work.wait()
        assert self._gathered is not None
        return self._gathered


def _in_parts(module: Any, x: Any, dy: Any) -> tuple[Any, Any]:
    """Return ``x`` and ``dy``; one is replaced by its `_Part` if gathered and W does not follow."""
    if queue.w_is_next or not getattr(module, "sequence_parallel", False):
        return x, dy
    if module.parallel_mode == "column" and type(x) is Tensor:
        return _Part(x, module.tp_group), dy
    if module.parallel_mode == "row" and type(dy) is Tensor:
        return x, _Part(dy, module.tp_group)
    return x, dy


def _comes_at_once(store: Any) -> bool:
    """Return whether the store's module computes gradients of weights and biases in I.

    I is the pass of the input gradient. Otherwise these gradients wait for the weight-gradient pass
    (W).
    """
    module = _remembered(store)
    if module is None:
        return False
    grouped = range(getattr(module, "num_gemms", 0))
    numbered = [f"{kind}{number}" for kind in ("weight", "bias") for number in grouped]
    names = [f"{prefix}{kind}" for prefix in ("", "fc1_", "fc2_") for kind in ("weight", "bias")]
    tensors = [getattr(module, name, None) for name in (*names, *numbered)]
    return not all(queue.splits(tensor) for tensor in tensors if isinstance(tensor, Tensor))


def _remembered(store: Any) -> Any:
    reference = _module_of.get(store)
    return None if reference is None else reference()


def _owner(store: Any) -> Any:
    module = _remembered(store)
    if module is None:
        raise ValueError(
            "a Transformer Engine layer other than Linear, LayerNormLinear, LayerNormMLP and "
            "GroupedLinear defers a weight gradient, which is not supported: use a schedule that "
            "does not split backward passes, such as 1f1b or gpipe"
        )
    return module


# Gradients of a module's weights, and gradients of its biases.
_Made = tuple[Sequence[Tensor], Sequence[Contribution]]


def _deferred(gradient: _Gradient, x: Any, dy: Any) -> Callable[[], Contributions]:
    """Return the function that computes ``gradient`` of ``x`` and ``dy``.

    It is a `RowProduct` if they are tensors or lists of tensors, but not for quantised ones, whose
    rows share scales.
    """
    in_lists = isinstance(x, list) and isinstance(dy, list)
    operands = (*x, *dy) if in_lists else (x, dy)

    def of_operands(*given: Any) -> Contributions:
        half = len(given) // 2
        return gradient.compute(*([*given[:half]], [*given[half:]]) if in_lists else given)

    def gathered() -> tuple[Any, ...]:
        return tuple(one.gathered() if isinstance(one, _Part) else one for one in operands)

    if all(type(operand) in (Tensor, _Part) for operand in operands):
        return RowProduct(gathered, of_operands)
    return lambda: of_operands(*gathered())


def _make(function: Callable[..., Any], x: Any, dy: Any) -> _Made:
    weight_gradient, bias_gradient = function(x, dy)
    return [weight_gradient], [bias_gradient]


def _make_grouped(
    function: Callable[..., Any], written: Callable[[], list[Tensor]], x: Any, dy: Any
) -> _Made:
    outputs = written()
    _, bias_gradients, _ = function(x, dy, outputs)
    return outputs, bias_gradients


def _taken_back(outputs: list[Tensor]) -> Callable[[], list[Tensor]]:
    """Empty the list ``outputs``, and return a function that allocates its tensors again later.

    The tensors are for weight gradients of a GroupedLinear, and nothing is written into them before
    the weight-gradient pass (W). Until then they would take as much memory as the weights. The list
    is emptied itself because autograd gets it next, and would add its tensors to the gradients.
    """
    shape, dtype, device = outputs[0].shape, outputs[0].dtype, outputs[0].device
    count = len(outputs)
    outputs[:] = [None] * count  # type: ignore[list-item]  # as autograd takes them
    return lambda: list(torch.empty(count, *shape, dtype=dtype, device=device))


@dataclass(frozen=True)
class _Gradient:
    """Deferred weight gradient of a module.

    ``fused`` tells whether ``make`` itself adds the weights' gradients to ``main_grad``.
    """

    weights: Weights
    biases: Weights
    fused: bool
    make: Callable[[Any, Any], _Made]

    def compute(self, x: Any, dy: Any) -> Contributions:
        """Return the contributions to the gradients of ``weights`` and then ``biases``."""
        made, made_of_biases = self.make(x, dy)
        parameters = (*self.weights, *self.biases)
        # A layer without biases returns gradients for them that are not used.
        gradients = (*([None] * len(made) if self.fused else made), *made_of_biases)
        return tuple(map(_contribution, parameters, gradients))


def _add_before(
    hooks: Sequence[Callable[[], None]], parameters: Weights, gradients: Contributions
) -> None:
    """Add ``gradients`` to ``.grad``, where ``hooks`` expect them.

    These hooks are those of a module's ``register_wgrad_accumulation_and_reduce_hooks``.
    """
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            add_to_grad(parameter, gradient)
    for hook in hooks:
        hook()


def _contribution(parameter: Tensor, gradient: Contribution) -> Contribution:
    """Return ``gradient`` as autograd would add it; None if there is nothing to add.

    Nothing is added for a bias whose gradient was computed in the input-gradient pass (I).
    """
    if gradient is None or not gradient.numel() or not parameter.requires_grad:
        return None
    return gradient.to(parameter.dtype)


def _parameters(module: Any, names: Sequence[str]) -> Weights:
    if any(getattr(module, name, None) is None for name in names):
        raise ValueError(
            f"{type(module).__name__} has no {', '.join(names)}, but stores its weights in "
            "another way (parameters_split, single_grouped_weight), for which weight gradients "
            "cannot be deferred: use a schedule that does not split backward passes, such as "
            "1f1b or gpipe"
        )
    return tuple(getattr(module, name) for name in names)


def _tensors_in(saved: Any) -> list[Tensor]:
    """Return the tensors in ``saved``; other objects, such as quantised tensors, are ignored."""
    if isinstance(saved, list | tuple):
        return [tensor for part in saved for tensor in _tensors_in(part)]
    if isinstance(saved, _Part):
        return [saved.tensor]
    return [saved] if isinstance(saved, Tensor) else []


def _cut_off(saved: Any) -> Any:
    """Return ``saved`` detached from the graph.

    The graph would keep the stage's input and its gradient alive.
    """
    if isinstance(saved, list | tuple):
        return [_cut_off(part) for part in saved]
    if not isinstance(saved, Tensor):
        return saved
    return queue.keep(saved.detach() if saved.requires_grad else saved)
