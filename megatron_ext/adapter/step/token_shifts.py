"""Multi-token prediction's messages within context-parallel groups, tried before the first step.

In its forward passes it shifts tokens and labels by one place, and the ranks that divide a sequence
send one another what crosses their borders. Megatron does that over the default group, where NCCL
makes a communicator for two ranks at their first message: amid a pass, with messages of the
pipeline posted. So they exchange one here, where all other connections are made.
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
    it. Collective over the group where they have multi-token prediction, as all its ranks then do.
    """
    if context_parallel.size() > 1 and any(map(predicts_further, models)):
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=torch.cuda.current_device())
        roll_tensor(tokens, cp_group=context_parallel)
