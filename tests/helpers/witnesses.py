"""Features that ran in a training, each recognised by a function that only this feature calls.

The numbers of a training do not show a feature: a reduction that overlaps, a layer that is
recomputed or a gradient that is checked gives the same numbers. So a mark ``covers`` of such a
setting counts only if its test, in a training under one of this project's schedules, has entered
the setting's function. The interpreter reports the call (``sys.monitoring``), so no function is
replaced.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CodeType
from typing import Any

from tests.helpers.covers.feature import Feature

# Variable with the setting that a night test switches off in our trainings, to check that the
# marked tests fail. The name has no prefix of ours, since the launcher refuses unknown names with
# it.
SWITCHED_OFF = "SETTING_SWITCHED_OFF"

_CORE = "megatron.core"
_TOOL = 4  # number of a tool of sys.monitoring; no other tool uses the number


def _always(caller: Any) -> bool:
    return True


@dataclass(frozen=True)
class Witness:
    """A ``function``, by module and name, that runs for the feature.

    ``when`` returns, for the object whose method it is, whether it runs for the feature. If a
    forward and a backward pass overlap, ``in_pairs`` runs in its place: a method of the same class,
    or of one with the same config.
    """

    function: str
    when: Callable[[Any], bool] = _always
    in_pairs: str | None = None


def _has(name: str) -> Callable[[Any], bool]:
    return lambda caller: bool(getattr(caller, name, False))


def _config(name: str, value: Any = True) -> Callable[[Any], bool]:
    return lambda caller: getattr(caller.config, name, None) == value


def _ddp(name: str) -> Callable[[Any], bool]:
    return lambda caller: bool(getattr(caller.ddp_config, name))


def _captures(module: str) -> Callable[[Any], bool]:
    return lambda caller: module in {part.name for part in caller.config.cuda_graph_modules or ()}


_BUCKETS = f"{_CORE}.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"
_DISPATCH = f"{_CORE}.transformer.moe.token_dispatcher"
_LAYER = f"{_CORE}.transformer.transformer_layer:TransformerLayer"
_MOE = f"{_CORE}.transformer.moe.moe_layer:MoELayer.forward"
_BLOCK = f"{_CORE}.transformer.transformer_block:TransformerBlock.forward"
_PLAN = f"{_CORE}.models.gpt.gpt_model:GPTModel.build_schedule_plan"
_RECOMPUTED = f"{_CORE}.recompute:checkpointed_forward"
_ROUTER = f"{_CORE}.transformer.moe.router:TopKRouter.gating"

WITNESSES = {
    Feature("average_in_collective"): Witness(
        f"{_BUCKETS}.start_grad_sync", _ddp("average_in_collective")
    ),
    Feature("calculate_per_token_loss"): Witness(
        f"{_CORE}.distributed.distributed_data_parallel:DistributedDataParallel.scale_gradients"
    ),
    Feature("check_for_nan_in_grad"): Witness(
        f"{_BUCKETS}.check_grads", _ddp("check_for_nan_in_grad")
    ),
    Feature("overlap_grad_reduce"): Witness(
        "megatron_ext.adapter.step.model_stage:ModelStage.gradients_complete",
        lambda stage: stage._model.ddp_config.overlap_grad_reduce,
    ),
    Feature("untie_embeddings_and_output_weights", "False"): Witness(
        f"{_CORE}.models.gpt.gpt_model:GPTModel.forward",
        _has("share_embeddings_and_output_weights"),
        in_pairs=_PLAN,
    ),
    Feature("overlap_param_gather"): Witness(f"{_BUCKETS}.finish_param_sync"),
    Feature("use_distributed_optimizer"): Witness(
        f"{_CORE}.optimizer.distrib_optimizer:DistributedOptimizer.__init__"
    ),
    Feature("cross_entropy_fusion_impl", "native"): Witness(
        f"{_CORE}.fusions.fused_cross_entropy:fused_vocab_parallel_cross_entropy"
    ),
    **{
        Feature("cuda_graph_scope", module): Witness(_BLOCK, _captures(module))
        for module in ("attn", "mlp", "moe_router", "moe_preprocess")
    },
    Feature("sequence_parallel"): Witness(_BLOCK, _config("sequence_parallel"), in_pairs=_PLAN),
    Feature("recompute_granularity", "full"): Witness(_RECOMPUTED),
    Feature("recompute_method", "uniform"): Witness(_BLOCK, _config("recompute_method", "uniform")),
    Feature("recompute_method", "block"): Witness(_BLOCK, _config("recompute_method", "block")),
    Feature("recompute_modules", "core_attn"): Witness(
        f"{_CORE}.transformer.attention:Attention._checkpointed_attention_forward"
    ),
    Feature("recompute_modules", "layernorm"): Witness(
        f"{_LAYER}._forward_attention", _has("recompute_input_layernorm")
    ),
    Feature("recompute_modules", "mlp"): Witness(f"{_LAYER}._forward_mlp", _has("recompute_mlp")),
    Feature("recompute_modules", "moe"): Witness(_MOE, _has("moe_layer_recompute")),
    Feature("recompute_modules", "shared_experts"): Witness(_MOE, _has("shared_experts_recompute")),
    Feature("recompute_modules", "moe_act"): Witness(
        f"{_CORE}.transformer.moe.experts:TEGroupedMLP.forward", _has("activation_recompute")
    ),
    Feature("recompute_modules", "mla_up_proj"): Witness(
        f"{_CORE}.transformer.multi_latent_attention:MLASelfAttention.get_query_key_value_tensors",
        _has("recompute_up_proj"),
    ),
    Feature("moe_grouped_gemm"): Witness(f"{_CORE}.transformer.moe.experts:TEGroupedMLP.forward"),
    Feature("moe_token_dispatcher_type", "alltoall"): Witness(
        f"{_DISPATCH}:MoEAlltoAllTokenDispatcher.token_dispatch"
    ),
    Feature("moe_flex_dispatcher_backend", "deepep"): Witness(
        f"{_DISPATCH}:_DeepepManager.dispatch"
    ),
    Feature("moe_flex_dispatcher_backend", "hybridep"): Witness(
        f"{_DISPATCH}:_HybridEPManager.dispatch"
    ),
    Feature("moe_shared_expert_overlap"): Witness(
        f"{_CORE}.transformer.moe.shared_experts:SharedExpertMLP.linear_fc1_forward_and_act"
    ),
    Feature("moe_router_dtype", "fp32"): Witness(_ROUTER, _config("moe_router_dtype", "fp32")),
}


def watch(features: Iterable[Feature] = WITNESSES) -> set[Feature]:
    """Return a set. From now on, each of ``features`` that runs in this process is added to the
    set."""
    seen: set[Feature] = set()
    wanted: dict[CodeType, list[Feature]] = {}
    for feature in features:
        witness = WITNESSES[feature]
        for function in filter(None, (witness.function, witness.in_pairs)):
            wanted.setdefault(_code(function), []).append(feature)

    def entered(code: CodeType, offset: int) -> Any:
        caller = sys._getframe(1).f_locals.get("self")
        for feature in tuple(wanted[code]):
            if WITNESSES[feature].when(caller):
                seen.add(feature)
                wanted[code].remove(feature)
        return None if wanted[code] else sys.monitoring.DISABLE

    started = sys.monitoring.events.PY_START
    if sys.monitoring.get_tool(_TOOL) is None:
        sys.monitoring.use_tool_id(_TOOL, "features")
    sys.monitoring.register_callback(_TOOL, started, entered)
    for code in wanted:
        sys.monitoring.set_local_events(_TOOL, code, started)
    sys.monitoring.restart_events()
    return seen


def _code(function: str) -> CodeType:
    module, _, name = function.partition(":")
    found: Any = importlib.import_module(module)
    for word in name.split("."):
        found = getattr(found, word)
    code: CodeType = inspect.unwrap(found).__code__
    return code


# Features of our trainings that were seen in the running test; None if no training is watched.
_seen: set[Feature] | None = None


def begin_test() -> None:
    """Forget the features of other tests' trainings."""
    global _seen
    _seen = None


def note(seen: Iterable[Feature]) -> None:
    """Add the features of a training under one of our schedules."""
    global _seen
    _seen = (_seen or set()) | set(seen)


_CALLER = "steps of a caller's own, without the launcher, which nothing watches"
_LAYERS = "layers by themselves, without a training of Megatron's"

# Reasons why none of the trainings of a marked test is watched, by file or by file and function.
UNWATCHED = {
    "tests/gpu/": "trains in processes that a launcher starts on GPUs",
    "tests/pipeline/training/test_adapters.py": _CALLER,
    "tests/pipeline/training/test_any_model.py": _CALLER,
    "tests/pipeline/callers/test_callers.py": _CALLER,
    "tests/pipeline/training/test_context_parallel.py::test_packed_sequences_of_a_caller": _CALLER,
    "tests/pipeline/training/test_hybrid_models.py::test_steps_are_stocks": _CALLER,
    "tests/pipeline/training/test_packed_sequences.py::test_a_callers_model": _CALLER,
    "tests/pipeline/training/test_packed_sequences.py::"
    "test_losses_and_gradients_of_a_callers": _CALLER,
    "tests/pipeline/training/test_recipe_settings.py::test_a_gradient_that_is_no_number": (
        "every rank ends with the error that the test looks for"
    ),
    "tests/patches/layers/test_low_precision.py": _LAYERS,
    "tests/patches/layers/test_tensor_parallel_communication.py": _LAYERS,
    "tests/patches/layers/test_tensor_parallel_layers.py": _LAYERS,
}


def unseen(marked: Iterable[Feature], test: str) -> list[Feature]:
    """Return those of the ``marked`` features that have a witness and did not run in any watched
    training of ``test`` (its file and function). The list is empty if no training of the test is
    watched."""
    if _seen is None and test.startswith(tuple(UNWATCHED)):
        return []
    return sorted(set(marked) & set(WITNESSES) - (_seen or set()))


# For each setting: the flags that are dropped to switch it off. These are its own flag, if that has
# another name than the setting, and the flags that need it.
_PARAMETERS = ("--overlap-param-gather", "--overlap-param-gather-with-optimizer-step")
_RECOMPUTE = tuple(
    f"--recompute-{word}" for word in ("granularity", "method", "num-layers", "modules")
)
_FLAGS = {
    "average_in_collective": ("--ddp-average-in-collective",),
    "packed": ("--sft",),
    "cuda_graph_scope": ("--cuda-graph-modules",),
    "num_layers_in_first_pipeline_stage": ("--decoder-first-pipeline-num-layers",),
    "num_layers_in_last_pipeline_stage": ("--decoder-last-pipeline-num-layers",),
    "grad_reduce_in_fp32": ("--grad-reduce-in-bf16",),
    "cross_entropy_fusion_impl": ("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl"),
    "precision": ("--bf16", "--fp16", "--fp8-format", "--fp8-recipe", "--fp4-format"),
    "overlap_grad_reduce": ("--overlap-grad-reduce", *_PARAMETERS),
    "use_distributed_optimizer": ("--use-distributed-optimizer", *_PARAMETERS),
    "recompute_granularity": _RECOMPUTE,
    "recompute_modules": _RECOMPUTE,
}
_OFF = {
    "check_for_nan_in_grad": "--no-check-for-nan-in-loss-and-grad",
}


def switched_off(words: list[str]) -> list[str]:
    """Return the ``words`` of a training; if they name a schedule of ours, with the setting
    switched off that the variable `SWITCHED_OFF` names."""
    setting = os.environ.get(SWITCHED_OFF)
    if not setting or not is_ours(words):
        return words
    if setting in _OFF:
        return [*words, _OFF[setting]]
    flags = _FLAGS.get(setting, ("--" + setting.replace("_", "-"),))
    left, drops = [], False
    for word in words:
        drops = word in flags if word.startswith("--") else drops
        if not drops:
            left.append(word)
    return left


def is_ours(words: Iterable[str]) -> bool:
    """Return whether the ``words`` of a training name one of our schedules."""
    return any(word.startswith("--pipeline-schedule") for word in words)
