"""Execution of a model's microbatch on one rank: sizes, parallelism, precision and recompute."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class Precision(StrEnum):
    """Number format in which layers' matrices are multiplied."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP8 = "fp8"
    FP4 = "fp4"

    @property
    def is_quantized(self) -> bool:
        """Whether tensors, which have 16 bits elsewhere, are cast for the products."""
        return self in (Precision.FP8, Precision.FP4)


class Framework(StrEnum):
    """Kernels and overlap that layers are assumed to have."""

    MEGATRON = "Megatron with Transformer Engine"
    PYTORCH = "plain PyTorch"  # with flash attention and a fused norm; nothing else is fused


@dataclass(frozen=True)
class Execution:
    """Execution of a microbatch. Values mean what they mean in Megatron's arguments.

    Attributes:
        sequence: tokens of a sample, on all context-parallel ranks together.
        precision: fp16 counts as bf16, which costs the same.
        recompute: whether whole layers are recomputed in the backward pass.
        recompute_method, recompute_num_layers: which layers are recomputed; ``block`` recomputes
            the first ``recompute_num_layers`` of a stage.
        recompute_modules: parts of layers that are recomputed, by Megatron's names.
        transformer_engine: whether layers are Transformer Engine's, which never store the attention
            matrix.
        captured: parts of layers that are in CUDA graphs and therefore have unsplit backward
            passes, by Megatron's names: ``attn``, ``mlp``, ``moe``, ``moe_router`` (with the shared
            expert), ``mamba``.
        gathered_for_w: tensors that are stored as a rank's share of the sequence and gathered a
            second time for W: ``inputs`` of column-parallel matrices (Megatron's local layers),
            and also ``gradients`` of row-parallel outputs (Transformer Engine's layers).
        userbuffers: which matrices, ``column``- or ``row``-parallel, have an unsplit backward pass
            because Userbuffers overlap products with communication. Empty: products wait for it.
        unkept: frozen matrices without a trained adapter, whose inputs are not stored, by the names
            of Megatron's modules.
        dispatcher: how tokens go to experts: ``alltoall``, ``allgather`` or ``flex``.
        context_exchange: Megatron's cp_comm_type: ``p2p``, ``all_gather``, ``a2a``, ``a2a+p2p``.
        slices: number of slices of each sequence; with more than one, all sizes are those of a mean
            slice, which attends to half of the sequence.
        overlap: share of the time of experts' messages that overlaps the other pass's computation
            if two passes run as a pair; 0: there are no pairs.
        pipeline_span: number of ranks from the first rank of a pipeline to its last; 0: it is not
            known, and pipeline ranks count as being on different nodes.
    """

    sequence: int
    micro_batch: int = 1
    tensor_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    expert_tensor_parallel: int = 1
    sequence_parallel: bool = True
    precision: Precision = Precision.BF16
    recompute: bool = False
    recompute_method: str = "uniform"
    recompute_num_layers: int = 0
    recompute_modules: frozenset[str] = frozenset()
    transformer_engine: bool = True
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    captured: frozenset[str] = frozenset()
    gathered_for_w: frozenset[str] = frozenset(["inputs", "gradients"])
    userbuffers: frozenset[str] = frozenset()
    unkept: frozenset[str] = frozenset()
    loss_fusion: bool = False
    dispatcher: str = "alltoall"
    context_exchange: str = "p2p"
    pipeline_span: int = 0
    slices: int = 1
    overlap: float = 0.0
    framework: Framework = Framework.MEGATRON

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of the tensors between layers."""
        return 4 if self.precision is Precision.FP32 else 2

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch, or of a mean slice, on a context-parallel rank, which all its
        tensor-parallel ranks see. At least one: more slices than tokens are refused elsewhere."""
        return max(self.sequence // self.context_parallel * self.micro_batch // self.slices, 1)

    @property
    def expert_replicas(self) -> int:
        """Data-parallel replicas that share each layer's experts, and exchange tokens in it."""
        ranks = self.tensor_parallel * self.context_parallel
        return math.lcm(self.expert_parallel * self.expert_tensor_parallel, ranks) // ranks

    @property
    def split_tokens(self) -> float:
        """Tokens of a microbatch that a rank has between layers: its share with sequence
        parallelism."""
        return self.tokens / (self.tensor_parallel if self.sequence_parallel else 1)

    def is_recomputed(self, position: int) -> bool:
        """Return whether the layer at ``position`` of its stage is recomputed as a whole."""
        if not self.recompute:
            return False
        return self.recompute_method != "block" or position < self.recompute_num_layers
