"""Optimizer steps and the zeroing of gradients, passed to the process's `PostValidation`.

`PostValidation` decides when a step is taken. It defers the zeroing of gradients, because a step
can be taken a second time only with its own gradients.

Not patched: prepare_grads, step_with_ready_grads and clipping, which are called unchanged; the
optimizers of torch, Apex and Transformer Engine, whose tensors are copied before a step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_ext.config import PipelineConfig
from megatron_ext.features.post_validation.adapter.optimizer import (
    OptimizerResult,
    OptimizerStep,
    nesting,
    zero_within_a_step,
)
from megatron_ext.features.post_validation.adapter.pending import PostValidation, post_validation
from megatron_ext.patches.engine import Patch, expect, wrap

_OPTIMIZER = "megatron.core.optimizer.optimizer"
_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_HYBRID = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer"
_DDP = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel"
_BUCKETS = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patches that take an optimizer step before all ranks' gradient norms are known."""
    return optimizer_patches(post_validation)


def optimizer_patches(post_validation: PostValidation) -> tuple[Patch, ...]:
    """Return the patches that pass optimizer steps and zeroing of gradients to post-validation.

    The zeroing is deferred while a step may still have to be redone with its gradients.
    """

    def step(stock: OptimizerStep, optimizer: Any) -> OptimizerResult:
        if nesting.is_inside:
            return stock(optimizer)
        return post_validation.optimizer_step(functools.partial(nesting.call, stock), optimizer)

    def zero_grad(stock: Callable[..., None], optimizer: Any, *args: Any, **named: Any) -> None:
        if post_validation.is_pending and not nesting.is_inside:
            post_validation.defer(functools.partial(nesting.call, stock, optimizer, *args, **named))
        else:
            stock(optimizer, *args, **named)

    def zero_grad_buffer(stock: Callable[..., None], model: Any) -> None:
        if post_validation.is_pending:
            post_validation.defer(functools.partial(zero_within_a_step, stock, model))
        else:
            stock(model)

    return (
        *(
            wrap(
                f"{_OPTIMIZER}:{name}.step",
                step,
                reason="post-validation takes a step before the global gradient norm is known",
                signature="(self)",
                digests=digests,
            )
            for name, digests in (
                ("ChainedOptimizer", {"0.18": "67229e7b6cbb", "0.19, 0.20": "eb0d30ee5d35"}),
                ("FP32Optimizer", {"0.18": "ac8606a67a03", "0.19, 0.20": "85a264f883ac"}),
                ("MixedPrecisionOptimizer", {"0.18": "1bec0cdb3129", "0.19, 0.20": "23504ee37ee7"}),
            )
        ),
        *(
            wrap(
                f"{name}.zero_grad",
                zero_grad,
                reason="an optimizer step that may be repeated still needs its gradients",
                signature="(self, set_to_none=True)",
            )
            for name in (
                f"{_OPTIMIZER}:ChainedOptimizer",
                f"{_OPTIMIZER}:FP32Optimizer",
                f"{_OPTIMIZER}:Float16OptimizerWithFloat16Params",
                _DISTRIBUTED,
            )
        ),
        wrap(
            f"{_DDP}.zero_grad_buffer",
            zero_grad_buffer,
            reason="an optimizer step that may be repeated still needs its gradients",
            signature="(self)",
            digests={"0.18, 0.19, 0.20": "ca0a5853280c"},
        ),
        *_relied_on(),
    )


def _relied_on() -> tuple[Patch, ...]:
    """Return expectations of the functions that `SpeculativeOptimizer` calls or replaces."""
    prepares = "the optimizer copies and unscales gradients here, and looks for infinities"
    steps = "an optimizer step writes only parameters, states and group settings"
    copies = "the optimizer copies its main parameters to the model here"
    gathers = "bucket groups record here which parameters were gathered"
    group = "this is the process group over which a norm is reduced"
    expected = (
        (
            f"{_OPTIMIZER}:MixedPrecisionOptimizer.prepare_grads",
            prepares,
            {"0.18, 0.19, 0.20": "7bd63f7a2ad6"},
        ),
        (
            f"{_OPTIMIZER}:MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan",
            prepares,
            {"0.18, 0.19, 0.20": "2e328d8e8a6a"},
        ),
        (
            f"{_OPTIMIZER}:FP32Optimizer.prepare_grads",
            prepares,
            {"0.18, 0.19, 0.20": "980b8d383be6"},
        ),
        (
            f"{_OPTIMIZER}:ChainedOptimizer.prepare_grads",
            prepares,
            {"0.18, 0.19, 0.20": "4bd13147ea55"},
        ),
        (
            f"{_OPTIMIZER}:MixedPrecisionOptimizer.step_with_ready_grads",
            steps,
            {"0.18": "bba465d63ebf", "0.19, 0.20": "83012fed48dc"},
        ),
        (
            f"{_OPTIMIZER}:FP32Optimizer.step_with_ready_grads",
            steps,
            {"0.18, 0.19, 0.20": "dcd11a303244"},
        ),
        (
            f"{_OPTIMIZER}:ChainedOptimizer.step_with_ready_grads",
            steps,
            {"0.18, 0.19, 0.20": "74dbef5ba96c"},
        ),
        (f"{_OPTIMIZER}:ChainedOptimizer._step", steps, {"0.18, 0.19, 0.20": "754298bf751a"}),
        (f"{_DISTRIBUTED}.step_with_ready_grads", steps, {"0.18, 0.19, 0.20": "3537a2f5f636"}),
        (f"{_HYBRID}.step", steps, {"0.18, 0.19, 0.20": "b00112fa1d2d"}),
        (
            f"{_HYBRID}._sync_hdo_param_groups_to_sub_optimizers",
            "the hybrid optimizer copies group settings to its parts here",
            {"0.18, 0.19, 0.20": "cd9b045d41ee"},
        ),
        (
            f"{_OPTIMIZER}:Float16OptimizerWithFloat16Params._copy_main_params_to_model_params",
            copies,
            {"0.18, 0.19, 0.20": "335f6ac11041"},
        ),
        (
            f"{_DISTRIBUTED}._copy_main_params_to_model_params",
            copies,
            {"0.18, 0.19, 0.20": "dc51cb3517f1"},
        ),
        (
            f"{_OPTIMIZER}:MegatronOptimizer.get_grad_norm",
            "the norm of gradients is reduced over the optimizer's own group",
            {"0.18": "30f3c8448d35", "0.19, 0.20": "c448545bd1d2"},
        ),
        (
            "megatron.core.optimizer.clip_grads:clip_grad_by_total_norm_fp32",
            "Megatron clips a norm that is within 1e-6 of the threshold",
            {"0.18, 0.19, 0.20": "8d1ed73c5d52"},
        ),
        (
            "megatron.core.optimizer.grad_scaler:DynamicGradScaler.update",
            steps,
            {"0.18, 0.19, 0.20": "0dedf54d95d9"},
        ),
        (f"{_DDP}.start_param_sync", gathers, {"0.18, 0.19, 0.20": "d357bd5ec646"}),
        (
            f"{_BUCKETS}.start_param_sync",
            gathers,
            {"0.18": "d472fa07b310", "0.19, 0.20": "3cca35d3fd56"},
        ),
        (f"{_BUCKETS}.finish_param_sync", gathers, {"0.18, 0.19, 0.20": "3a4189006f87"}),
        (
            f"{_BUCKETS}.reset",
            "a bucket group forgets here which gradients have come",
            {"0.18, 0.19, 0.20": "cf34e3cf8efe"},
        ),
        (
            "megatron.core.parallel_state:get_tensor_and_data_parallel_group",
            group,
            {"0.18": "344172041cfc", "0.19, 0.20": "f4089c362dad"},
        ),
        (
            "megatron.core.parallel_state:get_expert_tensor_and_model_parallel_group",
            group,
            {"0.18, 0.19, 0.20": "1b83f50928df"},
        ),
        (
            "megatron.core.parallel_state:get_tensor_model_parallel_group",
            group,
            {"0.18, 0.19, 0.20": "33cffde6bdcd"},
        ),
    )
    return tuple(
        expect(target, reason=reason, digests=digests) for target, reason, digests in expected
    )
