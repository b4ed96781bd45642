"""Multi-token prediction's messages within context-parallel groups, exchanged once before the first
step.

Its forward passes shift tokens and labels by one position, and the ranks that share a sequence
exchange the tokens at their borders. Megatron does that over the default group, on which NCCL makes
a communicator for two ranks at their first message: within a pass, while messages of the pipeline
are posted. So one message is exchanged here, where all other connections are made.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.transformer.multi_token_prediction import roll_tensor

from megatron_ext.adapter.model_parts import predicts_further


def connect_token_shifts(
    models: Sequence[torch.nn.Module], context_parallel: dist.ProcessGroup
) -> None:
    """Connect the ranks of ``context_parallel`` as passes of ``models``, a rank's chunks, will use
    it. Collective over the group if the models have multi-token prediction, as all its ranks then
    do."""
    if context_parallel.size() > 1 and any(map(predicts_further, models)):
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=torch.cuda.current_device())
        roll_tensor(tokens, cp_group=context_parallel)
