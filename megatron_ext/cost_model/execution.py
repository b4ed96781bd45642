"""How a microbatch of a model is run on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Precision(StrEnum):
    """In what layers' matrices are multiplied."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP8 = "fp8"
    FP4 = "fp4"

    @property
    def is_quantized(self) -> bool:
        """Whether tensors, which are in 16 bits elsewhere, are cast for it."""
        return self in (Precision.FP8, Precision.FP4)


class Framework(StrEnum):
    """The kernels and the overlap that layers are taken to have."""

    MEGATRON = "Megatron with Transformer Engine"
    PYTORCH = "plain PyTorch"  # with flash attention and a fused norm; nothing else is fused


@dataclass(frozen=True)
class Execution:
    """Names and meaning are those of Megatron's arguments where it has them.

    Attributes:
        sequence: tokens of a sample, on all context-parallel ranks together.
        precision: fp16 is bf16 here: it costs the same.
        recompute: whether whole layers are run again in the backward pass.
        recompute_method, recompute_num_layers: which; of ``block`` so many of a stage's layers.
        recompute_modules: which parts of layers are, by Megatron's names.
        transformer_engine: whether layers are Transformer Engine's: the attention matrix is never
            stored then.
        captured: which parts of layers are in CUDA graphs, and have whole backwards, by Megatron's
            names: ``attn``, ``mlp``, ``moe``, ``moe_router`` (with the shared expert), ``mamba``.
        gathers_again: what W gathers again with a share of the sequence, which is kept: ``inputs``
            of pairs of matrices, as Megatron's local layers do, and ``gradients`` of their outputs,
            as Transformer Engine's do too.
        userbuffers: of pairs whose products overlap their communication, which matrices keep whole
            backwards for it: ``column``, ``row``. Empty: they wait for communication.
        unkept: of matrices, by the names of Megatron's modules, those whose inputs nobody keeps:
            they are frozen, with nothing trained beside them.
        dispatcher: how tokens go to experts: ``alltoall``, ``allgather`` or ``flex``.
        context_exchange: Megatron's cp_comm_type: ``p2p``, ``all_gather``, ``a2a``, ``a2a+p2p``.
        overlap: of the time of experts' messages, how much goes on beside what another pass
            computes where two run as a pair; 0: there are no pairs.
        pipeline_span: how many ranks lie from the first rank of a pipeline to the last; 0: that is
            not known, and they are on different nodes.
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
    gathers_again: frozenset[str] = frozenset(["inputs", "gradients"])
    userbuffers: frozenset[str] = frozenset()
    unkept: frozenset[str] = frozenset()
    loss_fusion: bool = False
    dispatcher: str = "alltoall"
    context_exchange: str = "p2p"
    pipeline_span: int = 0
    overlap: float = 0.0
    framework: Framework = Framework.MEGATRON

    @property
    def element_bytes(self) -> int:
        """Of what goes from layer to layer."""
        return 4 if self.precision is Precision.FP32 else 2

    @property
    def tokens(self) -> int:
        """Of a microbatch on a context-parallel rank: what all tensor-parallel ranks see of it."""
        return self.sequence // self.context_parallel * self.micro_batch

    @property
    def split_tokens(self) -> float:
        """Of a microbatch between layers, on one rank."""
        return self.tokens / (self.tensor_parallel if self.sequence_parallel else 1)

    def is_again(self, position: int) -> bool:
        """Whether the layer at ``position`` of its stage is run again as a whole."""
        if not self.recompute:
            return False
        return self.recompute_method != "block" or position < self.recompute_num_layers
