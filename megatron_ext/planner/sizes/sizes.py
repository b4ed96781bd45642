"""Parallel sizes and the micro-batch of a training job, by Megatron's names.

Data parallelism is not among them: it is what is left of the GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Sizes:
    """Parallel sizes by Megatron's names; data parallelism follows from the number of GPUs.

    Attributes:
        tensor, pipeline, context, expert, expert_tensor: number of ranks of such a group.
        micro_batch: samples of a microbatch.
        sequence_parallel: whether tensor-parallel ranks split activations between layers.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    micro_batch: int = 1
    sequence_parallel: bool = False

    def data_parallel(self, gpus: int) -> int:
        """Return the number of data-parallel replicas on ``gpus``; 0 if the number of GPUs is not
        divisible."""
        copies, rest = divmod(gpus, self.tensor * self.pipeline * self.context)
        return 0 if rest else copies

    def text(self, gpus: int) -> str:
        """Return the parallel sizes of more than one rank, and the micro-batch size, in words.

        An example is ``TP 4 x PP 8 x DP 2, micro-batch 1``.
        """
        named = {
            "TP": self.tensor,
            "CP": self.context,
            "EP": self.expert,
            "ETP": self.expert_tensor,
            "PP": self.pipeline,
            "DP": self.data_parallel(gpus),
        }
        parts = [f"{name} {size}" for name, size in named.items() if size > 1]
        split = ", without sequence parallelism" * (self.tensor > 1 and not self.sequence_parallel)
        return f"{' x '.join(parts) or 'one rank'}, micro-batch {self.micro_batch}{split}"
