"""GPTModel called with a row in which answers share their prompts.

A layer that mixes tokens in a way unknown here would mix those of different answers. So a model is
checked when it is called with such a row for the first time. Its layers then get parameters that
describe the row as one document.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import log_single_rank
from torch import Tensor

from megatron_ext.adapter.slices.known_models import mixing_layers, unknown_mixer
from megatron_ext.adapter.transformer_engine.installed import can_split
from megatron_ext.base.logger import logger
from megatron_ext.features.shared_prompts.adapter.params import SharedPromptParams, for_layers
from megatron_ext.features.shared_prompts.adapter.refused_settings import refuse_settings
from megatron_ext.features.shared_prompts.settings import SharedPrompts

_FLAG = "--pipeline-shared-prompts"


@dataclass
class SharedModelCall:
    """Wrapper of GPTModel's forward, for rows with shared prompts if ``mode`` allows them."""

    mode: SharedPrompts
    _checked: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    _is_said: bool = False
    _is_warned: bool = False

    def forward(
        self, original: Callable[..., Any], model: GPTModel, *args: Any, **kwargs: Any
    ) -> Any:
        """Run ``original``, GPTModel's forward.

        A row with shared prompts is described to the layers as one document.

        Raises:
            ValueError: the model mixes tokens in a way that is not known, a setting of its config
                is refused, or a tensor has another length than the row.
        """
        call = inspect.signature(original).bind(model, *args, **kwargs)
        params = call.arguments.get("packed_seq_params")
        if not isinstance(params, SharedPromptParams):
            self._warn()
            return original(model, *args, **kwargs)
        if model not in self._checked:
            refuse_settings(model.config, self.mode)
            _refuse_unknown(model)
            self._checked.add(model)
        _check_lengths(model, call.arguments, params)
        self._say(params)
        call.arguments["packed_seq_params"] = for_layers(params)
        return original(*call.args, **call.kwargs)

    def plan(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``original``, GPTModel's build_schedule_plan, for a row without shared prompts.

        Raises:
            ValueError: the row has shared prompts.
        """
        if any(isinstance(given, SharedPromptParams) for given in (*args, *kwargs.values())):
            raise ValueError(
                f"{_FLAG} does not go with overlapped forward and backward passes, since "
                "Megatron's schedule plans do not know where sequences end: drop "
                f"--overlap-moe-expert-parallel-comm, or {_FLAG}"
            )
        return original(*args, **kwargs)

    def _say(self, params: SharedPromptParams) -> None:
        if self._is_said:
            return
        self._is_said = True
        assert params.shared is not None
        row = params.shared.row
        text = (
            f"prompts are computed once: the first microbatch has {len(row.sources)} tokens in "
            f"place of {len(row.places)}"
        )
        log_single_rank(logger, logging.INFO, text)

    def _warn(self) -> None:
        """Log once if training begins with a microbatch without described prompts."""
        if self._is_said or self._is_warned or not torch.is_grad_enabled():
            return
        self._is_warned = True
        text = (
            f"{_FLAG} {self.mode} does nothing for the first microbatch: forward_step has not "
            f"described it by megatron_ext.share_prompts, so each prompt is computed for all its "
            f"answers; call share_prompts, or drop {_FLAG}"
        )
        log_single_rank(logger, logging.WARNING, text)


def refuse_in_hybrid(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``original``, HybridModel's forward, for a microbatch without shared prompts.

    Raises:
        ValueError: the microbatch has shared prompts.
    """
    if any(isinstance(given, SharedPromptParams) for given in (*args, *kwargs.values())):
        raise ValueError(
            f"{_FLAG} does not go with a hybrid model, whose layers would carry their state from "
            "one answer of a row to the next: pass each sequence alone, or train a GPT model"
        )
    return original(model, *args, **kwargs)


def _check_lengths(model: GPTModel, given: Mapping[str, Any], params: SharedPromptParams) -> None:
    """Raise ValueError if a tensor that ``model`` reads has another length than the row.

    ``given`` are the arguments of the model's call. Layers would accept a longer tensor, but
    attention would compute nothing for the tokens behind the row.
    """
    assert params.shared is not None
    tokens = len(params.shared.row.sources)
    read = ["input_ids", "position_ids"] * model.pre_process + ["labels"] * model.post_process
    for name in read:
        tensor = given.get(name)
        if isinstance(tensor, Tensor) and tensor.shape[-1] != tokens:
            fix = "position_ids" if name == "position_ids" else f"once({name})"
            raise ValueError(
                f"share_prompts describes a row of {tokens} tokens, and the model was called with "
                f"{name} of {tensor.shape[-1]} tokens: call it with {fix} of the described "
                "microbatch"
            )
    received = None if model.pre_process else model.decoder.input_tensor
    if not isinstance(received, Tensor):
        return
    config = model.config
    length = len(received) * (config.tensor_model_parallel_size if config.sequence_parallel else 1)
    if length != tokens:
        raise ValueError(
            f"share_prompts describes a row of {tokens} tokens, and the stage has received "
            f"{length} tokens from the previous stage: set variable_seq_lengths=True in the "
            "model's config, or pad all rows to one length by share_prompts(multiple=...)"
        )


def _refuse_unknown(model: GPTModel) -> None:
    known = known_attention()
    for layer in mixing_layers(model):
        if (unknown := unknown_mixer(layer, known)) is not None:
            raise ValueError(
                f"{_FLAG} does not go with {unknown}: answers would not attend to their prompts; "
                f"build the model with Transformer Engine's attention, or drop {_FLAG}"
            )


def known_attention() -> list[Callable[..., Any]]:
    """Return the forward functions of core attention modules that work with shared prompts."""
    if not can_split():
        return []
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    return [TEDotProductAttention.forward]
