"""Execution of a model's microbatch on one rank: sizes, parallelism, precision and recompute.

The same model costs other seconds and bytes under other settings. All that an estimate reads of a
training is in `Execution`, by Megatron's names; the model's own dimensions are in `Model`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class Precision(StrEnum):
    """Number format in which the matrices of layers are multiplied."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP8 = "fp8"
    MXFP8 = "mxfp8"  # 8-bit floats with a scale for each 32 elements
    FP4 = "fp4"

    @property
    def is_quantized(self) -> bool:
        """Whether tensors, which have 16 bits elsewhere, are cast to fewer bits for matrix
        products."""
        return self in (Precision.FP8, Precision.MXFP8, Precision.FP4)


class Framework(StrEnum):
    """Software whose kernels and overlap a cost estimate assumes for the layers."""

    MEGATRON = "Megatron with Transformer Engine"
    # Flash attention and the norm are fused and nothing else, as in Aleph Alpha's Scaling
    # (https://github.com/Aleph-Alpha/scaling): tensor-parallel ranks gather the logits, and each
    # has the whole loss (transformer/model/layers/lm_head.py), a gate's matrix is a layer of its
    # own (core/nn/mlp.py), and gradients are all-reduced in fp32 (core/optimizer/allreduce.py).
    PYTORCH = "plain PyTorch"


@dataclass(frozen=True)
class Execution:
    """Settings of how a microbatch is executed, with the values of Megatron's arguments.

    Attributes:
        sequence: tokens of a sample, on all context-parallel ranks together.
        precision: fp16 counts as bf16, which costs the same.
        recompute: whether whole layers are recomputed in the backward pass.
        recompute_method, recompute_num_layers: which layers are recomputed; ``block`` recomputes
            the first ``recompute_num_layers`` of a stage.
        recompute_modules: parts of layers that are recomputed, by Megatron's names.
        transformer_engine: whether layers are Transformer Engine's, which never store the attention
            matrix.
        local_flash_attention: whether Megatron's local layers have fused attention, as with
            ``--use-flash-attn`` in versions before the core library.
        captured: parts of layers that are in CUDA graphs and therefore have unsplit backward
            passes, by Megatron's names: ``attn``, ``mlp``, ``moe``, ``moe_router`` (with the shared
            expert), ``mamba``.
        gathered_for_w: tensors that are stored as a rank's share of the sequence and gathered a
            second time for W: ``inputs`` of column-parallel matrices (Megatron's local layers), and
            also ``gradients`` of row-parallel outputs (Transformer Engine's layers).
        userbuffers: which matrices, ``column``- or ``row``-parallel, have an unsplit backward pass
            because Userbuffers overlap products with communication. Empty: products wait for
            communication.
        is_frozen: whether layers' weights are frozen, so that no unsplit backward pass has a W.
        unkept: frozen matrices without a trained adapter, whose inputs are not stored, by the names
            of Megatron's modules.
        dispatcher: how tokens go to experts: ``alltoall``, ``allgather`` or ``flex``.
        context_exchange: Megatron's cp_comm_type: ``p2p``, ``all_gather``, ``a2a``, ``a2a+p2p``.
        slices: number of slices of each sequence; with more than one, all sizes are those of a mean
            slice, which attends to half of the sequence.
        overlap: share of the time of experts' messages that overlaps the computation of another
            pass if a forward and a backward pass run as one, unless the GPU reaches less; 0: passes
            do not overlap.
        has_one_queue: whether kernels and messages share one hardware queue, before Blackwell
            (``CUDA_DEVICE_MAX_CONNECTIONS=1``).
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
    local_flash_attention: bool = False
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    captured: frozenset[str] = frozenset()
    gathered_for_w: frozenset[str] = frozenset(["inputs", "gradients"])
    userbuffers: frozenset[str] = frozenset()
    is_frozen: bool = False
    unkept: frozenset[str] = frozenset()
    loss_fusion: bool = False
    dispatcher: str = "alltoall"
    context_exchange: str = "p2p"
    pipeline_span: int = 0
    slices: int = 1
    overlap: float = 0.0
    has_one_queue: bool = False
    framework: Framework = Framework.MEGATRON

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of the tensors between layers."""
        return 4 if self.precision is Precision.FP32 else 2

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch, or of a mean slice of its sequence, on a context-parallel rank.

        All tensor-parallel ranks see them. There is at least one: more slices than tokens are
        refused elsewhere.
        """
        return max(self.sequence // self.context_parallel * self.micro_batch // self.slices, 1)

    @property
    def expert_replicas(self) -> int:
        """Number of data-parallel replicas whose ranks share one set of experts and exchange
        tokens."""
        ranks = self.tensor_parallel * self.context_parallel
        return math.lcm(self.expert_parallel * self.expert_tensor_parallel, ranks) // ranks

    @property
    def split_tokens(self) -> float:
        """Tokens of a microbatch that a rank has between layers; with sequence parallelism, its
        share."""
        return self.tokens / (self.tensor_parallel if self.sequence_parallel else 1)

    @property
    def has_fused_attention(self) -> bool:
        """Whether attention never writes its matrix of scores."""
        return self.transformer_engine or self.local_flash_attention

    @property
    def has_local_kernels(self) -> bool:
        """Whether Megatron's local layers run, with separate kernels for biases, dropouts and
        copies."""
        return not self.transformer_engine and self.framework is Framework.MEGATRON

    @property
    def ranks_of_loss(self) -> int:
        """Number of tensor-parallel ranks that share the logits and the loss.

        The number is 1 in plain PyTorch, where each rank gathers all logits.
        """
        return 1 if self.framework is Framework.PYTORCH else self.tensor_parallel

    def is_recomputed(self, position: int) -> bool:
        """Return whether the layer at ``position`` of its stage is recomputed as a whole."""
        if not self.recompute:
            return False
        return self.recompute_method != "block" or position < self.recompute_num_layers
