"""A model as Megatron's arguments describe it, and the layers of each stage.

Fields have the names and the meaning of Megatron's arguments, resolved: no field is None. A layer
is a string of its parts, in the symbols of Megatron's hybrid patterns and one of our own (``w``):

    *  attention, with latent keys and values if the model has them         -  an MLP
    w  the same in a sliding window                                         E  experts
    +  attention with latent keys and values, as in hybrid patterns         M  Mamba
    G  a gated delta net

For example, ``*-`` is a transformer layer, and ``M`` a layer of a hybrid model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from megatron_ext.cost_model.tower import Tower

SYMBOLS = frozenset("*w+GM-E")  # symbols of the layer types whose costs are known
ATTENTION = frozenset("*w+")


@dataclass(frozen=True)
class Model:
    """Dimensions of a language model, by the names of Megatron's arguments.

    Attributes:
        layers: the parts of each layer.
        vocabulary: rows of the embedding and of the output layer, padded as Megatron pads them.
        num_query_groups: equal to the number of heads, unless keys and values are shared.
        window_size: number of preceding tokens that a token attends to in a sliding window.
        max_position_embeddings: rows of a table of learned positions; 0: there is none.
        is_rotary: whether queries and keys are rotated by their positions.
        q_lora_rank: rank of latent attention's queries; 0: queries are not compressed.
        mtp_layer: the parts of a layer of multi-token prediction.
        is_causal: whether a token attends only to tokens before it.
        is_frozen: whether the language model's own parameters are frozen. Adapters on them are not
            counted.
        tower: the vision tower in front of the language model, on its first stage.
        sparse_attention: Megatron's name of an attention in which tokens choose those that they
            attend to, in place of ``*``; "": there is none.
        unknown: settings of the model that this description ignores, in words.
    """

    layers: tuple[str, ...]
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    ffn_hidden_size: int
    vocabulary: int
    gated_linear_unit: bool = False
    untie_embeddings_and_output_weights: bool = False
    add_bias_linear: bool = False
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    normalization: str = "LayerNorm"
    softmax_type: str = "vanilla"
    attention_output_gate: bool = False
    window_size: int = 0
    max_position_embeddings: int = 0
    is_rotary: bool = True

    multi_latent_attention: bool = False
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_head_dim: int = 0
    qk_pos_emb_head_dim: int = 0
    v_head_dim: int = 0

    linear_conv_kernel_dim: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0

    mamba_num_heads: int = 0
    mamba_head_dim: int = 0
    mamba_state_dim: int = 0
    mamba_num_groups: int = 0

    num_experts: int = 0
    moe_router_topk: int = 0
    moe_router_num_groups: int = 0
    moe_router_group_topk: int = 0
    moe_ffn_hidden_size: int = 0
    moe_shared_expert_intermediate_size: int = 0
    moe_shared_expert_gate: bool = False
    moe_latent_size: int = 0
    moe_router_enable_expert_bias: bool = False

    mtp_num_layers: int = 0
    mtp_use_repeated_layer: bool = False
    mtp_layer: str = "*-"

    is_causal: bool = True
    is_frozen: bool = False
    tower: Tower | None = None
    sparse_attention: str = ""

    unknown: tuple[str, ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether the costs of all parts of the model's layers are known."""
        return set("".join(self.layers)) <= SYMBOLS

    @property
    def why_no_estimate(self) -> str | None:
        """Reason why seconds of the model cannot be estimated; None if they can."""
        return why_no_estimate_with(self.sparse_attention)

    @property
    def query_width(self) -> int:
        """Summed width of the queries of all attention heads."""
        return self.num_attention_heads * self.kv_channels

    @property
    def key_value_width(self) -> int:
        """Summed width of the keys of all query groups; their values have the same width."""
        return self.num_query_groups * self.kv_channels

    def evenly(self, stages: int) -> list[int]:
        """Return the number of layers of each of ``stages`` stages if all have equally many.

        Raises:
            ValueError: the layers cannot be split evenly.
        """
        per_stage, remainder = divmod(len(self.layers), stages)
        if remainder:
            raise ValueError(
                f"{len(self.layers)} layers cannot be split evenly over {stages} stages"
            )
        return [per_stage] * stages


def why_no_estimate_with(sparse_attention: str) -> str | None:
    """Return why seconds with ``sparse_attention``, a name or "", cannot be estimated.

    None if they can.
    """
    if not sparse_attention:
        return None
    return (
        f"how long sparse attention ({sparse_attention}) takes is not known (published "
        f"steps take a fifth of what plain attention would, to six times as long)"
    )


@dataclass(frozen=True)
class Stage:
    """Layers and other parts of a model on one pipeline stage.

    Attributes:
        layers: the parts of each of its layers.
        depths: number of tokens after the next one that it predicts too. Each takes a layer of
            multi-token prediction, and one more run of the output layer.
        output_layer: whether it has the output layer and the loss.
        earlier_depths: number of depths on earlier stages if this stage has the output layer, which
            predicts their tokens too; else 0.
        ends_layers: whether it has the last layer, and only multi-token prediction and the output
            layer are behind it.
    """

    layers: tuple[str, ...]
    embedding: bool = False
    depths: int = 0
    output_layer: bool = False
    earlier_depths: int = 0
    ends_layers: bool = False

    @property
    def final_norm(self) -> bool:
        """Whether the stage has the norm behind the model's last layer.

        That is the stage of the output layer, or with multi-token prediction the stage of the last
        layer.
        """
        is_behind = not self.layers and self.output_runs > 1
        return self.ends_layers or (self.output_layer and not is_behind)

    @property
    def output_runs(self) -> int:
        """Number of runs of the output layer on this stage for a microbatch; 0 if it has none."""
        return 1 + self.depths + self.earlier_depths if self.output_layer else 0


def stages_of(
    model: Model, counts: Sequence[int], depths: Sequence[int] | None = None
) -> tuple[Stage, ...]:
    """Return the stages of ``model`` in order; ``counts`` are their numbers of layers.

    The embedding is on the first stage, the output layer on the last. ``depths`` are those of
    multi-token prediction on each stage; None: all are on the last.
    """
    ends = [0, *accumulate(counts)]
    assert ends[-1] == len(model.layers), (counts, len(model.layers))
    last = len(counts) - 1
    if depths is None:
        depths = [0] * last + [model.mtp_num_layers]
    last_with_layers = max((number for number, count in enumerate(counts) if count), default=last)
    return tuple(
        Stage(
            layers=model.layers[start:end],
            embedding=number == 0,
            depths=depths[number],
            output_layer=number == last,
            earlier_depths=sum(depths[:-1]) if number == last else 0,
            ends_layers=model.mtp_num_layers > 0 and number == last_with_layers != last,
        )
        for number, (start, end) in enumerate(pairwise(ends))
    )
