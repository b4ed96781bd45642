"""Optimizer step on the partial state of some pipeline ranks, which can be rolled back.

Megatron's own step makes each rank wait for the slowest one, to learn the norm of all gradients and
whether any is infinite. `SpeculativeOptimizer` splits the step: it prepares the gradients with
reductions within a rank's own stages, steps before the whole norm is known, restores what the step
has overwritten, and runs Megatron's own step on the prepared gradients.

The parts of Megatron that it relies on are listed where Megatron's optimizers are patched
(`patches/megatron/core/optimizer/optimizer/steps.py`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as megatron_optimizers
from megatron.core import parallel_state
from megatron.core.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
)
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_ext.features.post_validation.refusals import OPTIMIZER_REFUSALS
from megatron_ext.features.post_validation.runtime.partial_state import PartialState
from megatron_ext.features.post_validation.runtime.snapshot import Snapshot

# Result of an optimizer step: whether parameters were updated, the gradient norm, and the number of
# zero gradients.
OptimizerResult = tuple[bool, float | None, int | None]
OptimizerStep = Callable[[Any], OptimizerResult]

# Smallest relative distance of a gradient norm from a threshold. Closer norms may lie on either
# side of the threshold, depending on the order in which the norm is summed.
_MARGIN = 1e-5
_CLIP_EPSILON = 1e-6  # Megatron's own epsilon, which it adds to the norm before it clips


class SpeculativeOptimizer:
    """Optimizer of Megatron's that can step before the gradient norm of all ranks is known.

    The step has parts: prepare, step, take back, redo. ``optimizer`` is the training loop's (a
    chain or a single one). ``models`` are the rank's chunks, wrapped in DistributedDataParallel.

    Raises:
        ValueError: a step of ``optimizer`` cannot be rolled back.
    """

    def __init__(self, optimizer: Any, models: Sequence[Any]) -> None:
        if (reason := why_not(optimizer)) is not None:
            raise ValueError(reason)
        self._optimizer = optimizer
        self._models = models
        self._parts = _parts(optimizer)
        # Saved values of loss scalers and parameter groups from before the step.
        self._values = Snapshot()
        self._overwritten = Snapshot()
        self._is_prepared = False
        self._has_stepped = False
        self._has_kept = False

    @property
    def snapshot(self) -> Snapshot:
        """Copy of the state that an optimizer step overwrites.

        Its text form gives the size and the place (device or host) of each part of the copy.
        """
        return self._overwritten

    @torch.no_grad()
    def prepare(self) -> PartialState:
        """Prepare gradients as Megatron does, and return their validation state.

        The state is that of this rank's stages. Collective over the ranks that share these stages,
        which all get the same state.
        """
        scalers = (getattr(part, "grad_scaler", None) for part in self._parts)
        self._values.keep(
            (),
            [*self._optimizer.param_groups, *(vars(scaler) for scaler in scalers if scaler)],
        )
        self._is_prepared, self._has_stepped, self._has_kept = True, False, False
        with contextlib.ExitStack() as stack:
            for part in self._parts:
                group = _group_of_stage(part)
                stack.enter_context(_answering(part, "get_grad_stats_parallel_group", group))
            if self._optimizer.prepare_grads():
                return PartialState(squared_norm=0.0, found_inf=True)
            norms = [float(part.get_grad_norm()) for part in self._parts]
        return PartialState(squared_norm=sum(norm**2 for norm in norms), found_inf=False)

    def is_quiet(self, state: PartialState) -> bool:
        """Return whether Megatron's step would certainly neither clip nor skip, given ``state``.

        ``state`` is assumed to be the state of all ranks. The answer is false within a relative
        1e-5 of a threshold: there the order of Megatron's own sums decides.
        """
        config = self._optimizer.config
        norm = math.sqrt(state.squared_norm)
        if state.found_inf or not math.isfinite(norm):
            return False
        if config.clip_grad > 0 and norm + _CLIP_EPSILON >= config.clip_grad * (1 - _MARGIN):
            return False
        return norm < config.grad_norm_skip_threshold * (1 - _MARGIN)

    @torch.no_grad()
    def step(self, keep: bool) -> None:
        """Take an optimizer step on the prepared gradients, unclipped.

        With ``keep`` the previous state is copied, so that the step can be rolled back.

        Raises:
            ValueError: there is too little memory for the copy.
        """
        assert self._is_prepared and not self._has_stepped, "a step of gradients not prepared"
        if keep:
            self._overwritten.keep(*_overwritten(self._parts))
        self._has_stepped, self._has_kept = True, keep
        success = self._optimizer.step_with_ready_grads()
        assert success, "an optimizer that can be taken back always steps"

    @torch.no_grad()
    def take_back(self) -> None:
        """Restore the state before `prepare`, except the gradients.

        Also needed if no step was taken: loss scaler and learning rates have advanced, and
        parameters may have been gathered. Collective over data-parallel ranks.
        """
        assert self._is_prepared, "there is no step to take back"
        for model in self._models:
            _forget_gathering(model)
        if self._has_stepped:
            assert self._has_kept, "what a step has overwritten was not kept"
            self._overwritten.restore()
            for part in self._parts:
                if not part.is_stub_optimizer and not isinstance(part, FP32Optimizer):
                    part._copy_main_params_to_model_params()
            for model in self._models:
                _gather_parameters(model)
        self._values.restore()
        self._has_stepped = False

    @torch.no_grad()
    def redo(self, found_inf: bool) -> OptimizerResult:
        """Roll the step back, and run Megatron's own step once on the prepared gradients.

        ``found_inf`` tells whether any model-parallel rank has an infinity; then the step is
        skipped. Returns the result of Megatron's step. Collective over the model-parallel ranks,
        like Megatron's step.
        """
        self.take_back()
        for part in self._parts:
            if getattr(part, "grad_scaler", None):
                part.grad_scaler.update(found_inf and _found_anywhere(part))
        self._is_prepared = False
        with _answering(self._optimizer, "prepare_grads", found_inf), nesting.entered():
            result: OptimizerResult = self._optimizer.step()
        return result


def why_not(optimizer: Any) -> str | None:
    """Return why steps of ``optimizer`` cannot be rolled back; None if they can."""
    for part in _parts(optimizer):
        if type(part) not in (
            FP32Optimizer,
            Float16OptimizerWithFloat16Params,
            DistributedOptimizer,
        ):
            return f"a step of {type(part).__name__} cannot be taken back: choose another optimizer"
        known = (
            torch.optim.Adam,
            torch.optim.AdamW,
            torch.optim.SGD,
            megatron_optimizers.Adam,
            megatron_optimizers.SGD,
        )
        for inner in () if part.optimizer is None else _inner(part.optimizer):
            if not isinstance(inner, known):
                return (
                    f"a step of {type(inner).__name__} cannot be taken back: write "
                    f"--optimizer adam or --optimizer sgd"
                )
        for settings in (part.config, getattr(part, "ddp_config", None)):
            for refusal in OPTIMIZER_REFUSALS:
                value = getattr(settings, refusal.setting, None)
                if value is not None and refusal.unsupported(value):
                    return (
                        f"a step with {refusal.setting}={value} cannot be taken back: "
                        f"{refusal.remedy}"
                    )
    return None


def _parts(optimizer: Any) -> list[Any]:
    if type(optimizer) is ChainedOptimizer:
        return list(optimizer.chained_optimizers)
    return [optimizer]


def _group_of_stage(part: Any) -> dist.ProcessGroup:
    """Return the process group over which gradients of a rank's stages are sharded.

    ``part`` is one optimizer of the rank's chain.
    """
    if isinstance(part, DistributedOptimizer):
        return parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    if any(group.get("is_expert_parallel") for group in part.param_groups):
        return parallel_state.get_expert_tensor_and_model_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def _overwritten(
    parts: Sequence[Any],
) -> tuple[list[torch.Tensor], list[MutableMapping[Any, Any]]]:
    """Return the tensors and mappings that an optimizer step writes.

    16-bit parameters are not among them, since they are cast from these tensors.
    """
    tensors: list[torch.Tensor] = []
    mappings: list[MutableMapping[Any, Any]] = []
    for part in parts:
        if part.is_stub_optimizer:
            continue
        for group in part.optimizer.param_groups:
            tensors += group["params"]
        for inner in _inner(part.optimizer):
            for group in inner.param_groups:
                tensors += group["params"]
            # The mapping of states by parameter is saved too, because some parameters have no state
            # before the first step.
            mappings += [inner.state, *inner.state.values()]
            if inner is not part.optimizer:
                # A hybrid optimizer's inner optimizer gets new parameter groups in each step, so
                # its attributes are saved.
                mappings.append(vars(inner))
    return tensors, mappings


def _inner(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    """Return the optimizers that take the step of ``optimizer``.

    A hybrid optimizer contains several, on the host and on the device.
    """
    if isinstance(optimizer, HybridDeviceOptimizer):
        return list(optimizer.sub_optimizers)
    return [optimizer]


def _found_anywhere(part: Any) -> bool:
    """Return whether any rank has found an infinity in the gradients of ``part``.

    ``part`` is one optimizer of the rank's chain, with its own loss scaler.
    """
    dist.all_reduce(
        part.found_inf, op=dist.ReduceOp.MAX, group=part.get_grad_stats_parallel_group()
    )
    return bool(part.found_inf.item() > 0)


def _forget_gathering(model: Any) -> None:
    """Make forward hooks gather the parameters of ``model`` anew, as after an optimizer step.

    The first passes of the next step may have gathered some parameters already, or are gathering
    them.
    """
    if not model.ddp_config.overlap_param_gather:
        return
    for group in [*model.bucket_groups, *model.expert_parallel_bucket_groups]:
        if group.param_gather_handle is not None:
            group.param_gather_handle.wait()
            group.param_gather_handle = None
        group.param_gather_dispatched = False


def _gather_parameters(model: Any) -> None:
    """Gather the parameters of ``model`` on all data-parallel ranks, unless its hooks do so."""
    config = model.ddp_config
    if config.use_distributed_optimizer and not config.overlap_param_gather:
        model.start_param_sync()


@contextlib.contextmanager
def _answering(owner: Any, method: str, answer: Any) -> Iterator[None]:
    """Context in which ``owner.method()`` returns ``answer``; other objects are unaffected."""
    assert method not in vars(owner)
    setattr(owner, method, lambda: answer)
    try:
        yield
    finally:
        delattr(owner, method)


class Nesting:
    """Flag that is set while a function of Megatron's runs, which may call patched methods."""

    def __init__(self) -> None:
        self.is_inside = False

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        before, self.is_inside = self.is_inside, True
        try:
            yield
        finally:
            self.is_inside = before

    def call(self, stock: Callable[..., Any], *args: Any, **named: Any) -> Any:
        with self.entered():
            return stock(*args, **named)


nesting = Nesting()


def zero_within_a_step(stock: Callable[..., None], model: Any) -> None:
    """Zero the gradient buffers of ``model`` within a step, and still hold its reductions back.

    Megatron's own function, ``stock``, leaves each bucket group ready to reduce, as Megatron calls
    it only between steps. Here that state of the bucket groups is restored afterwards.
    """
    groups = [*model.bucket_groups, *model.expert_parallel_bucket_groups]
    reduces = [group.is_last_microbatch for group in groups]
    stock(model)
    for group, is_last_microbatch in zip(groups, reduces, strict=True):
        group.is_last_microbatch = is_last_microbatch
