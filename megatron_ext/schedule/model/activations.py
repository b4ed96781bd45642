"""What a microbatch leaves on a stage for its backward pass, and what I leaves there for W.

34 bytes are kept for each unit of width of a GPT of 16 bits, 20 with norms, activations and dropout
run again (Korthikanti et al. 2022, section 4; Wan et al. 2025).
"""

from __future__ import annotations

import operator
from dataclasses import astuple, dataclass, replace

from megatron_ext.schedule.model.execution import Execution
from megatron_ext.schedule.model.model import Model, Stage


@dataclass(frozen=True)
class Kept:
    """What layers keep of a token, on all tensor-parallel ranks together.

    Attributes:
        elements: kept for the backward pass.
        masks: bytes kept of the dropouts.
        widths: of what enters and of what leaves the matrices whose gradients wait for W.
        whole: of ``widths``, those that each tensor-parallel rank has whole: in halves the inputs
            of pairs' first matrices, and the gradients of the last ones' outputs.
    """

    elements: float = 0.0
    masks: float = 0.0
    widths: float = 0.0
    whole: float = 0.0

    def __add__(self, other: Kept) -> Kept:
        return Kept(*map(operator.add, astuple(self), astuple(other)))


def held_of_stage(model: Model, stage: Stage, execution: Execution) -> tuple[float, float]:
    """Bytes of a microbatch on a rank of ``stage``: from F to I, and from I to W; without the
    logits."""
    tokens, size = execution.tokens, execution.element_bytes
    share = 1 / execution.tensor_parallel
    boundary = tokens * model.hidden_size * size
    # The projection's input, and what the norms before and after it and the layer have as theirs;
    # or what is looked up, where the rest is run again.
    activation = stage.depths * (boundary if execution.recompute else 4 * boundary * share)
    left = stage.depths * 3 * boundary * share
    layers = (*stage.layers, *[model.mtp_layer] * stage.depths)
    for position, layer in enumerate(layers):
        kept = sum((_kept_by(symbol, model, execution) for symbol in layer), Kept())
        if execution.is_again(position):
            activation += boundary
        else:
            activation += (kept.elements * size + kept.masks) * tokens * share
        left += _left_for_w(kept, execution) * tokens * size
    return activation, left


def _left_for_w(kept: Kept, execution: Execution) -> float:
    """Widths that wait for W on a rank."""
    share = 1 / execution.tensor_parallel
    kinds = 2 - len(execution.gathers_again) if execution.sequence_parallel else 2  # that are whole
    return kept.widths * share + kept.whole / 2 * kinds * (1 - share)


def _kept_by(symbol: str, model: Model, execution: Execution) -> Kept:
    hidden, captured = model.hidden_size, execution.captured
    match symbol:
        case "*" | "w" | "+":
            kept, pair, name = _attention(model, execution), 2 * hidden, "attn"
        case "G":
            kept, pair, name = _delta_net(model, execution), 2 * hidden, "attn"
        case "M":
            kept, pair, name = _mamba(model, execution), 2 * hidden, "mamba"
        case "-":
            kept, pair, name = _mlp(model, execution), 2 * hidden, "mlp"
        case _:
            kept, pair, name = _experts(model, execution), 0, "moe"
            if model.moe_shared_expert_intermediate_size:
                pair = 2 * hidden
    if name in captured:
        return replace(kept, widths=0.0, whole=0.0)
    if execution.tensor_parallel == 1 or not pair:
        return kept
    if "column" in execution.userbuffers:
        return replace(kept, widths=0.0)
    if execution.userbuffers:
        return replace(kept, widths=kept.widths - hidden - _row_input(symbol, model), whole=hidden)
    return replace(kept, whole=float(pair))


def _row_input(symbol: str, model: Model) -> float:
    """The width of what enters the last matrix of a pair."""
    match symbol:
        case "*" | "w" | "+":
            if model.multi_latent_attention:
                return model.num_attention_heads * model.v_head_dim
            return model.query_width
        case "G":
            return model.linear_num_value_heads * model.linear_value_head_dim
        case "M":
            return model.mamba_num_heads * model.mamba_head_dim
        case "-":
            return model.ffn_hidden_size
    return model.moe_shared_expert_intermediate_size


def _normed(model: Model, execution: Execution) -> int:
    """Elements that are kept of a norm's input, and of its output, which enters matrices."""
    return (1 if "layernorm" in execution.recompute_modules else 2) * model.hidden_size


def _attention(model: Model, execution: Execution) -> Kept:
    if model.multi_latent_attention:
        heads = model.num_attention_heads
        query = heads * (model.qk_head_dim + model.qk_pos_emb_head_dim)
        output = heads * model.v_head_dim
        latent = model.q_lora_rank + model.kv_lora_rank + model.qk_pos_emb_head_dim
        inside, made = query + query + output, 2 * latent
    else:
        query = output = model.query_width
        inside, made = query + 2 * model.key_value_width, 0
    is_made_again = model.multi_latent_attention and "mla_up_proj" in execution.recompute_modules
    elements: float = _normed(model, execution) + output + made
    elements += 0 if is_made_again else inside
    if not execution.transformer_engine and "core_attn" not in execution.recompute_modules:
        elements += 2.5 * model.num_attention_heads * execution.sequence
    widths = model.hidden_size + inside + output + made + model.hidden_size
    return Kept(elements, model.hidden_size, widths)


def _mlp(model: Model, execution: Execution) -> Kept:
    activation = _matrices(model) * model.ffn_hidden_size  # its input, and its output
    again = "mlp" in execution.recompute_modules
    elements = _normed(model, execution) + (0 if again else activation)
    return Kept(elements, model.hidden_size, 2 * model.hidden_size + activation)


def _matrices(model: Model) -> int:
    return 3 if model.gated_linear_unit else 2


def _experts(model: Model, execution: Execution) -> Kept:
    hidden, latent = model.hidden_size, model.moe_latent_size
    shared, routed = model.moe_shared_expert_intermediate_size, model.moe_router_topk
    entering = routed * (latent or hidden) + (hidden if shared else 0)
    own = routed * model.moe_ffn_hidden_size
    activation = _matrices(model) * (own + shared)
    again = execution.recompute_modules
    elements = _normed(model, execution)
    if "moe" not in again:
        elements += entering + activation
        elements -= own if "moe_act" in again else 0  # what leaves the activation
        elements -= _matrices(model) * shared if "shared_experts" in again else 0
    widths = 2 * entering + activation + (2 * (hidden + latent) if latent else 0)
    return Kept(elements, hidden, widths)


def _delta_net(model: Model, execution: Execution) -> Kept:
    keys = model.linear_num_key_heads * model.linear_key_head_dim
    values = model.linear_num_value_heads * model.linear_value_head_dim
    projected = 2 * keys + 2 * values + 2 * model.linear_num_value_heads
    return _recurrent(model, execution, projected, values)


def _mamba(model: Model, execution: Execution) -> Kept:
    width = model.mamba_num_heads * model.mamba_head_dim
    states = model.mamba_num_groups * model.mamba_state_dim
    return _recurrent(model, execution, 2 * width + 2 * states + model.mamba_num_heads, width)


def _recurrent(model: Model, execution: Execution, projected: int, width: int) -> Kept:
    elements = _normed(model, execution) + 2 * projected + width  # around its convolution
    hidden = model.hidden_size
    return Kept(elements, hidden, 2 * hidden + projected + width)
