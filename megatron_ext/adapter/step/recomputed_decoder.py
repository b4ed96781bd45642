"""Decoder that R recomputes, in a stage that otherwise runs once.

As in Megatron's own recompute, hooks of the caller's on a stage's model, decoder and embedding then
run once, with gradients. The stage's graph, made in F, has a node in place of the decoder's. In the
backward pass that node runs the backward pass of the graph that R has made of the decoder.

Activations outside the decoder, such as the first stage's embeddings, are stored from F on.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor

from megatron_ext.adapter.model_parts import language_model
from megatron_ext.adapter.step.callers_hooks import say_once
from megatron_ext.adapter.step.checkpointed_forward import (
    RandomStates,
    checkpointing,
    hooked_around_layers,
    recomputing,
)
from megatron_ext.adapter.step.repeatable_call import Autocast


def decoder_to_recompute(
    stage: int, model: torch.nn.Module, config: Any, *, takes_slices: bool
) -> Any | None:
    """Return the decoder of ``model``, a stage's chunk, if it is to be recomputed alone, else None.

    The decoder is recomputed alone if the caller has hooks around its layers, which would run twice
    if the whole stage were recomputed. A warning is logged if the decoder cannot be recomputed
    alone, as with slices of sequences, whose last stage would store logits.
    """
    hooked = hooked_around_layers(model)
    if not hooked:
        return None
    decoder = getattr(language_model(model), "decoder", None)
    if isinstance(decoder, TransformerBlock) and not (takes_slices or config.enable_autocast):
        return decoder
    say_once(
        model,
        f"--pipeline-recompute: hooks on the forward pass of {', '.join(hooked)} of stage {stage} "
        "run twice for a recomputed microbatch, in F without gradients and again in R",
        logging.WARNING,
    )
    return None


class RecomputedDecoder:
    """Decoder (transformer layers) of a stage, recomputed for one microbatch."""

    def __init__(self, decoder: Any, is_quantised: bool) -> None:
        self._decoder = decoder
        self._is_quantised = is_quantised
        self._call: tuple[tuple[Any, ...], dict[str, Any]] = (), {}
        self._random_states: RandomStates = ()
        self._autocast = Autocast({})  # state of torch's autocast in F
        self._input = self._output = torch.empty(0)

    @contextlib.contextmanager
    def checkpointed(self) -> Iterator[None]:
        """Context in which the stage's F runs, with the decoder as a node that R recomputes."""
        attributes = vars(self._decoder)
        kept = {"forward": attributes["forward"]} if "forward" in attributes else {}
        self._forward = self._decoder.forward
        self._decoder.forward = self._first
        try:
            yield
        finally:
            del self._decoder.forward
            attributes.update(kept)

    def recompute(self) -> None:
        """Run the decoder a second time, with gradients, in the recompute pass R."""
        with self._autocast.restored(), recomputing(self._random_states, self._is_quantised):
            self._output = self._run(self._input)

    def first(self) -> Tensor:
        """Return the decoder's output in F, computed without gradients."""
        with checkpointing(self._is_quantised) as self._random_states:
            # The input is detached because a decoder without layers returns its input itself.
            return self._run(self._input.detach())

    def backward(self, dy: Tensor) -> Tensor | None:
        """Run the decoder's backward pass with the output's gradient.

        Return its input's gradient.
        """
        torch.autograd.backward(self._output, dy)
        return self._input.grad

    def _first(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Tensor:
        decoder = self._decoder
        given = hidden_states if decoder.pre_process else decoder.input_tensor
        self._call, self._autocast = (args, kwargs), Autocast.now()
        self._input = given.detach().requires_grad_(given.requires_grad)
        # The decoder's input may require no gradient although its weights do. The additional empty
        # tensor makes autograd run the backward function in any case.
        output: Tensor = _Decoder.apply(self, given, torch.empty(0, requires_grad=True))
        return output

    def _run(self, x: Tensor) -> Tensor:
        args, kwargs = self._call
        decoder = self._decoder
        before = decoder.input_tensor
        decoder.set_input_tensor(None if decoder.pre_process else x)
        output: Tensor = self._forward(x, *args, **kwargs)
        decoder.set_input_tensor(before)
        assert isinstance(output, Tensor), f"the decoder returned {type(output).__name__}"
        return output


class _Decoder(torch.autograd.Function):
    """Autograd function that makes the decoder a node of the stage's graph."""

    @staticmethod
    def forward(ctx: Any, decoder: RecomputedDecoder, x: Tensor, trained: Tensor) -> Tensor:
        ctx.decoder = decoder
        return decoder.first()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return None, ctx.decoder.backward(dy), None
