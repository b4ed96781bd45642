"""Description of a microbatch whose sequences share prompts, as callers write it.

In reinforcement learning many answers begin with one prompt, which is usually computed once for
each answer. A caller describes the sequences of a microbatch. The description turns them into the
shorter row that the model runs, and the model's output back into that of the sequences.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_ext.features.shared_prompts.adapter.params import SharedPromptParams, shared_params
from megatron_ext.features.shared_prompts.runtime.rows import shared_row


class SharedPromptBatch:
    """Microbatch whose sequences share prompts, as a row in which each shared prompt comes once.

    Attributes:
        packed_seq_params: the argument of the model's call.
        position_ids: the argument of the model's call: position of each token in its sequence,
            int64 [1, row].
    """

    packed_seq_params: SharedPromptParams
    position_ids: Tensor

    def __init__(
        self,
        lengths: Sequence[int],
        prompts: Sequence[int],
        groups: Sequence[Hashable],
        multiple: int,
        device: torch.device,
    ) -> None:
        given = _numbers(lengths), _numbers(prompts), _numbers(groups)
        row = shared_row(*given, multiple)
        self.packed_seq_params = shared_params(row, device)
        shared = self.packed_seq_params.shared
        assert shared is not None
        self.position_ids = shared.positions[None]
        self._sources, self._places = (
            torch.tensor(numbers).to(device, non_blocking=True)
            for numbers in (row.sources, row.places)
        )

    def once(self, tensor: Tensor) -> Tensor:
        """Return the row's part of ``tensor``, in which the tokens of a shared prompt come once.

        Args:
            tensor: tokens, labels or another property of the sequences' tokens, [1, tokens, ...].

        Raises:
            ValueError: sequences of a group differ in their shared prompt. On a GPU an assertion of
                the device fails instead, as the host does not wait for it.
        """
        self._check("once", tensor, len(self._places))
        row = tensor.index_select(1, self._sources)
        shared = row.index_select(1, self._places)
        both_nan = (shared != shared) & (tensor != tensor)
        is_same = ((shared == tensor) | both_nan).all()
        message = "share_prompts: sequences of one group have prompts that differ"
        if tensor.is_cuda:
            torch._assert_async(is_same, message)
        elif not is_same:
            raise ValueError(f"{message}: give sequences with different prompts different groups")
        return row

    def in_sequences(self, output: Tensor) -> Tensor:
        """Return the model's ``output`` of the row for the tokens of the separate sequences.

        ``output`` is [1, row, ...], the result [1, tokens, ...]: the model's output for sequences
        that are packed without sharing. A loss that a caller computes from it counts a token of a
        prompt once for each sequence.
        """
        self._check("in_sequences", output, len(self._sources))
        return output.index_select(1, self._places)

    def _check(self, name: str, tensor: Tensor, tokens: int) -> None:
        if tensor.dim() < 2 or tensor.shape[:2] != (1, tokens):
            raise ValueError(
                f"share_prompts: {name} was called with a tensor of shape {list(tensor.shape)}: "
                f"give a tensor of shape [1, {tokens}, ...]"
            )


def _numbers(given: Any) -> Any:
    """Return ``given`` as a list of numbers if it is a tensor, or a list of tensors.

    Elements of a tensor could not be keys: each is equal only to itself in a dictionary.

    Raises:
        ValueError: a tensor is on a GPU, for which the host would wait within a pass.
    """
    if not isinstance(given, Tensor):
        return [_numbers(one) if isinstance(one, Tensor) else one for one in given]
    if given.device.type != "cpu":
        raise ValueError(
            f"share_prompts: lengths, prompts or groups are on {given.device}, and each pass "
            "would wait for that device to read them: give numbers on the host, as the data "
            "loader has them"
        )
    return given.tolist()
