"""GPTModel's forward pass of one slice, called with the caller's whole batch.

Callers pass tokens, positions, labels and masks of a whole microbatch, and do not know of slices.
The call is repeated for each slice. What belongs to single tokens is cut to the slice; the whole
arguments stay available to parts that look beyond it, such as multi-token prediction.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from megatron_ext.adapter.slices.context_parallel import PACKED, refuse_other_cuts
from megatron_ext.adapter.slices.packs import as_one_document
from megatron_ext.runtime.slices.running_slice import Span, running_slice

_FLAG = "--pipeline-slices"

# Arguments of GPTModel.forward with an element per token, in their last dimension.
_OF_TOKENS = ("input_ids", "position_ids", "labels", "loss_mask")
_UNTRIED = (
    "decoder_input",
    "extra_block_kwargs",
    "inference_context",
    "inference_params",
    "output_processor",
    "padding_mask",
)


class WholeCall:
    """Arguments of a caller's model call for a whole microbatch, while a slice of it runs."""

    def __init__(self) -> None:
        self._arguments: dict[str, Any] = {}

    def arguments(self, *names: str) -> dict[str, Any]:
        """Return the arguments with these ``names`` for the whole microbatch.

        Return None for missing ones.
        """
        return {name: self._arguments.get(name) for name in names}

    @contextlib.contextmanager
    def running(self, arguments: dict[str, Any]) -> Iterator[None]:
        self._arguments = arguments
        try:
            yield
        finally:
            self._arguments = {}


whole_call = WholeCall()


def call_with_slice(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``original``, GPTModel's forward, for the running slice of the sequences, if any.

    Raises:
        ValueError: an argument is not known to work with slices.
    """
    span = running_slice.span
    if span is None:
        return original(model, *args, **kwargs)
    call = inspect.signature(original).bind(model, *args, **kwargs)
    with whole_call.running(dict(call.arguments)):
        call.arguments.update(cut_to_slice(call.arguments, span))
        return original(*call.args, **call.kwargs)


def cut_to_slice(given: dict[str, Any], span: Span) -> dict[str, Any]:
    """Return the arguments in ``given`` that differ for the slice ``span``, each cut to the slice.

    Raises:
        ValueError: as `call_with_slice`.
    """
    for name in _UNTRIED:
        if given.get(name) is not None:
            raise ValueError(
                f"{_FLAG} does not go with the model's argument {name}: this combination is "
                f"untested; drop {_FLAG}"
            )
    parts: dict[str, Any] = {}
    if (packed := given.get("packed_seq_params")) is not None:
        if span.ranks > 1:
            raise ValueError(PACKED)
        parts["packed_seq_params"] = as_one_document(packed, span)
    for name in _OF_TOKENS:
        if (tensor := given.get(name)) is not None:
            _check_length(name, tensor.shape[-1], span.length // span.ranks)
            parts[name] = tensor[..., span.here]
    if (mask := given.get("attention_mask")) is not None:
        parts["attention_mask"] = _cut_mask(mask, span)
    if parts and span.ranks > 1:
        refuse_other_cuts(given.get("position_ids"))
    return parts


def _cut_mask(mask: Tensor, span: Span) -> Tensor:
    """Return the part of an attention ``mask`` for a slice's queries and all keys that they see.

    ``mask`` is [.., queries, keys].
    """
    queries, keys = mask.shape[-2:]
    _check_length("attention_mask", queries, span.length // span.ranks)
    _check_length("attention_mask", keys, span.length)
    return mask[..., span.here, : span.local.end]


def _check_length(name: str, length: int, expected: int) -> None:
    if length != expected:
        raise ValueError(
            f"{_FLAG} cuts sequences of {expected} tokens, and the model was called with {name} "
            f"of {length} tokens: give all microbatches the same sequence length, or drop {_FLAG}"
        )
