"""Tensors that a rank trains, by their names in torch_dist and their places in the whole tensors.

Names and places come from the model's own sharded_state_dict, so every model that Megatron can save
has them; the optimizer's states are named after their parameters, as in torch_dist. A distributed
optimizer's states are taken as sharded, and nothing is gathered.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.utils import unwrap_model
from megatron.training.checkpointing import _build_sharded_state_dict_metadata

from megatron_ext.adapter.model_parts import head_is_looked_up, language_model
from megatron_ext.adapter.parity.digest import dtype_of
from megatron_ext.recordings.piece import Piece

NamedTensor = tuple[Piece, torch.Tensor]


@dataclass(frozen=True)
class _Part:
    """Elements ``start`` to ``stop`` of a flattened parameter, as a piece of a named tensor."""

    start: int
    stop: int
    piece: Piece
    # Whether the piece would be the main replica if there were no data parallelism.
    is_main_without_dp: bool


class NamedTensors:
    """Tensors of a model and its optimizer, by the names that a torch_dist checkpoint gives them.

    Raises:
        ValueError: the model has no names in torch_dist.
    """

    def __init__(self, model: Sequence[torch.nn.Module], optimizer: Any, args: Any) -> None:
        self._optimizers = list(_steppers(optimizer))
        self._others: list[NamedTensor] = []  # buffers in the checkpoint that are not parameters
        self._parts: dict[torch.nn.Parameter, tuple[_Part, ...]] = {}
        for chunk in unwrap_model(list(model)):
            try:
                with _without_output_layer(chunk):
                    state = chunk.sharded_state_dict(
                        metadata=_build_sharded_state_dict_metadata(args)
                    )
            except (AssertionError, AttributeError, NotImplementedError) as error:
                raise ValueError(
                    f"{type(chunk).__name__} has no names for its tensors: its "
                    f"sharded_state_dict fails with {type(error).__name__}: {error}"
                ) from error
            self._name(chunk, state)

    def _name(self, chunk: torch.nn.Module, state: Any) -> None:
        parameters = {id(parameter): parameter for parameter in chunk.parameters()}
        sharded, _ = extract_sharded_tensors_and_factories(state)
        for entry in nested_values(sharded):
            parameter = parameters.get(id(entry.data))
            if parameter is not None:
                self._parts[parameter] = tuple(_parts(entry))
            elif isinstance(entry, ShardedTensor) and entry.data is not None:
                (part,) = _parts(entry)
                self._others.append((part.piece, entry.data))

    def parameters(self) -> Iterator[NamedTensor]:
        """Yield the named pieces of the model's parameters and of its buffers in a checkpoint."""
        for parameter, parts in self._parts.items():
            yield from _cut(parts, _plain(parameter), "", 0)
        yield from self._others

    def optimizer_states(self) -> Iterator[NamedTensor]:
        """Yield the named pieces of the main parameters and optimizer states on this rank."""
        for optimizer, is_copy in self._optimizers:
            if hasattr(optimizer, "model_param_group_index_map"):
                states = _divided_states(optimizer)
            else:
                states = _whole_states(optimizer, self._parts)
            for parameter, kind, tensor, start in states:
                if parts := self._parts.get(parameter):
                    yield from _cut(parts, tensor, f"optimizer.state.{kind}.", start, is_copy)


@contextlib.contextmanager
def _without_output_layer(chunk: torch.nn.Module) -> Iterator[None]:
    """Let sharded_state_dict of ``chunk`` work with tied embeddings and multi-token prediction.

    On such a last stage Megatron asserts that the output layer has no weight of its own, but it has
    an unused one. A method of the model is replaced within the context.
    """
    model: Any = language_model(chunk)
    if not head_is_looked_up(chunk):
        yield
        return
    model.tie_embeddings_and_output_weights_state_dict = _leave_out
    try:
        yield
    finally:
        del model.tie_embeddings_and_output_weights_state_dict


def _leave_out(state: dict[str, Any], output_layer: str, *unused: Any) -> None:
    state.pop(output_layer, None)


def _is_copy(part: _Part) -> bool:
    return part.piece.is_copy


def _is_copy_without_dp(part: _Part) -> bool:
    return not part.is_main_without_dp


def _steppers(
    optimizer: Any, is_copy: Callable[[_Part], bool] = _is_copy
) -> Iterator[tuple[Any, Callable[[_Part], bool]]]:
    """Yield the optimizers in a chain, each with a function that recognizes its copied states.

    A copied state is one that another rank has, too.
    """
    if isinstance(optimizer, LayerWiseDistributedOptimizer):
        # The layer-wise optimizer has the states of a parameter on one data-parallel rank only.
        is_copy = _is_copy_without_dp
    chain = getattr(optimizer, "chained_optimizers", None)
    if chain is not None:
        for chained in chain:
            yield from _steppers(chained, is_copy)
    elif optimizer is not None and not getattr(optimizer, "is_stub_optimizer", False):
        instance = getattr(optimizer, "distributed_optimizer_instance_id", None)
        if instance is not None:
            # Every instance of the distributed optimizer has the same states, so only those of the
            # first instance are recorded.
            is_copy = _is_copy_without_dp if instance == 0 else lambda part: True
        yield optimizer, is_copy


def _parts(entry: ShardedTensor | ShardedTensorFactory) -> Iterator[_Part]:
    """Yield the parts of a parameter, with their names and places in a torch_dist checkpoint.

    Tensors that are saved separately, such as the two halves of a gated linear layer, are views of
    the parameter. If they are no views, the local shard is yielded as one part, whose name is made
    of theirs.
    """
    if isinstance(entry, ShardedTensor):
        yield _part(entry, 0)
        return
    built = list(nested_values(entry.build()))
    data = entry.data
    if all(_is_view(part.data, data) for part in built):
        for part in built:
            yield _part(part, part.data.storage_offset() - data.storage_offset())
        return
    shape = tuple(data.shape)
    here = ";".join(f"{part.key}{part.global_offset}" for part in built)
    piece = Piece(
        name=here,
        index=(),
        global_shape=shape,
        offset=(0,) * len(shape),
        shape=shape,
        start=0,
        stop=data.numel(),
        dtype=dtype_of(data),
    )
    yield _Part(0, data.numel(), piece, is_main_replica(_without_dp(entry.replica_id)))


def _is_view(part: torch.Tensor, of: torch.Tensor) -> bool:
    same = part.untyped_storage().data_ptr() == of.untyped_storage().data_ptr()
    return same and part.is_contiguous()


def _part(entry: ShardedTensor, start: int) -> _Part:
    axes = entry.prepend_axis_num
    numel = math.prod(entry.local_shape)
    piece = Piece(
        name=entry.key,
        index=tuple(entry.global_offset[:axes]),
        global_shape=tuple(entry.global_shape[axes:]),
        offset=tuple(entry.global_offset[axes:]),
        shape=tuple(entry.local_shape),
        start=0,
        stop=numel,
        dtype=str(entry.dtype).removeprefix("torch."),
        is_copy=not is_main_replica(entry.replica_id),
    )
    return _Part(start, start + numel, piece, is_main_replica(_without_dp(entry.replica_id)))


def _without_dp(replica: Any) -> Any:
    return (*replica[:-1], 0) if isinstance(replica, tuple) else replica


def _cut(
    parts: Sequence[_Part],
    tensor: torch.Tensor,
    prefix: str,
    start: int,
    is_copy: Callable[[_Part], bool] = _is_copy,
) -> Iterator[NamedTensor]:
    """Yield ``tensor``, elements of a flattened parameter from ``start`` on, as named pieces."""
    flat = tensor.detach().reshape(-1)
    if tensor.dim() == 0:  # a step counter is whole on each rank that has a part of the parameter
        piece = replace(
            parts[0].piece,
            name=prefix + parts[0].piece.name,
            global_shape=(),
            offset=(),
            shape=(),
            start=0,
            stop=1,
            dtype=dtype_of(tensor),
            is_copy=is_copy(parts[0]),
        )
        yield piece, flat
        return
    for part in parts:
        first, end = max(start, part.start), min(start + flat.numel(), part.stop)
        if first < end:
            piece = replace(
                part.piece,
                name=prefix + part.piece.name,
                start=first - part.start,
                stop=end - part.start,
                dtype=dtype_of(tensor),
                is_copy=is_copy(part),
            )
            yield piece, flat[first - start : end - start]


def _plain(parameter: torch.Tensor) -> torch.Tensor:
    """Return ``parameter``, dequantized if Transformer Engine has quantized it."""
    if type(parameter) in (torch.Tensor, torch.nn.Parameter):
        return parameter
    return parameter.dequantize() if hasattr(parameter, "_quantizer") else parameter


_State = tuple[torch.nn.Parameter, str, torch.Tensor, int]


def _whole_states(optimizer: Any, parameters: Iterable[torch.nn.Parameter]) -> Iterator[_State]:
    # The layer-wise optimizer has plain torch optimizers for fp32 parameters, without a wrapper
    # that has an attribute "optimizer".
    inner = getattr(optimizer, "optimizer", optimizer)
    optimized = {id(main) for group in inner.param_groups for main in group["params"]}
    for parameter in parameters:
        main = getattr(parameter, "main_param", parameter)
        if id(main) not in optimized:
            continue
        if main is not parameter:
            yield parameter, "fp32_param", main, 0
        for kind, value in inner.state.get(main, {}).items():
            if isinstance(value, torch.Tensor):
                yield parameter, kind, value, 0


def _divided_states(optimizer: Any) -> Iterator[_State]:
    for parameter in optimizer.model_param_group_index_map:
        start = optimizer._get_model_param_range_map(parameter)["param"].start
        states = optimizer._get_main_param_and_optimizer_states(parameter)
        for kind, tensor in states.items():
            yield parameter, "fp32_param" if kind == "param" else kind, tensor, start
