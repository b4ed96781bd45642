"""The two copies of a tied embedding where one rank holds both."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.utils import get_attr_wrapped_model


def tied_weights(
    model: Sequence[torch.nn.Module],
) -> tuple[torch.nn.Parameter, torch.nn.Parameter] | None:
    """The embedding's and the output layer's copy among the chunks of this rank.

    None where they are not tied, or not both here.
    """
    first = get_attr_wrapped_model(model[0], "pre_process", return_model_obj=True)
    last = get_attr_wrapped_model(model[-1], "pre_process", return_model_obj=True)
    if first is last or not (first.pre_process and last.post_process):
        return None
    if not last.share_embeddings_and_output_weights:
        return None
    return first.shared_embedding_or_output_weight(), last.shared_embedding_or_output_weight()
