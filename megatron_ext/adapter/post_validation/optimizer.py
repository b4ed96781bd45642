"""A step of Megatron's optimizer on what a part of the pipeline knows, which can be taken back.

Stock's step holds each rank until the slowest is done, to learn the norm of all gradients and
whether one is infinite. `SpeculativeOptimizer` takes the same step in pieces: it prepares the
gradients with reductions inside a rank's own stages, steps before the whole norm is known, puts
back what the step has overwritten, and has stock's own step run on the prepared gradients.

What of Megatron it relies on is told where its optimizers are patched
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

from megatron_ext.adapter.refusals import POST_VALIDATION_OPTIMIZER_REFUSALS
from megatron_ext.runtime.post_validation.partial_state import PartialState
from megatron_ext.runtime.post_validation.snapshot import Snapshot

Result = tuple[bool, float | None, int | None]  # whether it stepped, the norm, zero gradients
Step = Callable[[Any], Result]

# Relative: nearer than this to a threshold, the order of a norm's sums may decide.
_MARGIN = 1e-5
_CLIP_EPSILON = 1e-6  # stock's, added to the norm


class SpeculativeOptimizer:
    """Megatron's optimizer of a rank, with a step in pieces: prepare, step, take back, do again.

    ``optimizer`` is the one that the training loop has (a chain or a single one), ``models`` are
    the rank's chunks, wrapped in DistributedDataParallel.

    Raises:
        ValueError: what ``optimizer`` overwrites cannot be taken back.
    """

    def __init__(self, optimizer: Any, models: Sequence[Any]) -> None:
        if (reason := why_not(optimizer)) is not None:
            raise ValueError(reason)
        self._optimizer = optimizer
        self._models = models
        self._parts = _parts(optimizer)
        self._values = Snapshot()  # loss scalers and groups' settings, as they were at prepare
        self._overwritten = Snapshot()
        self._is_prepared = False
        self._has_stepped = False
        self._has_kept = False

    @property
    def snapshot(self) -> Snapshot:
        """What the step overwrites. Its text says where that is kept and what it takes."""
        return self._overwritten

    @torch.no_grad()
    def prepare(self) -> PartialState:
        """Prepare the gradients as stock does, and measure those of this rank's stages.

        Collective among the ranks that share these stages, which all get the same state.
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
        """Whether stock would certainly neither clip nor skip, were ``state`` the whole one.

        Not within a relative 1e-5 of a threshold: there stock's own order of sums decides.
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
        """Step on the prepared gradients, unclipped; with ``keep`` it can be taken back.

        Raises:
            ValueError: there is no memory to keep the state before it.
        """
        assert self._is_prepared and not self._has_stepped, "a step of gradients not prepared"
        if keep:
            self._overwritten.keep(*_overwritten(self._parts))
        self._has_stepped, self._has_kept = True, keep
        success = self._optimizer.step_with_ready_grads()
        assert success, "an optimizer that can be taken back always steps"

    @torch.no_grad()
    def take_back(self) -> None:
        """Put everything back to where it was before `prepare`, but for the gradients.

        Collective among data-parallel ranks. Also needed where no step was taken: loss scaler and
        learning rates have moved on, and parameters may have been gathered.
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
                _gather_again(model)
        self._values.restore()
        self._has_stepped = False

    @torch.no_grad()
    def redo(self, found_inf: bool) -> Result:
        """Take the step back and let stock step on the prepared gradients, once.

        Collective over the model-parallel ranks, as stock's step. ``found_inf``: in any of them;
        then the step is skipped. Returns what stock's step does.
        """
        self.take_back()
        for part in self._parts:
            if getattr(part, "grad_scaler", None):
                part.grad_scaler.update(found_inf and _found_anywhere(part))
        self._is_prepared = False
        with _answering(self._optimizer, "prepare_grads", found_inf), nesting.entered():
            result: Result = self._optimizer.step()
        return result


def why_not(optimizer: Any) -> str | None:
    """Why steps of ``optimizer`` cannot be taken back, or None where they can."""
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
            for refusal in POST_VALIDATION_OPTIMIZER_REFUSALS:
                value = getattr(settings, refusal.setting, None)
                if value is not None and refusal.unsupported(value):
                    return (
                        f"a step with {refusal.setting}={value} cannot be taken back: "
                        f"{refusal.instead}"
                    )
    return None


def _parts(optimizer: Any) -> list[Any]:
    if type(optimizer) is ChainedOptimizer:
        return list(optimizer.chained_optimizers)
    return [optimizer]


def _group_of_stage(part: Any) -> dist.ProcessGroup:
    """The ranks among which the gradients of a rank's stages are divided, for ``part``."""
    if isinstance(part, DistributedOptimizer):
        return parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    if any(group.get("is_expert_parallel") for group in part.param_groups):
        return parallel_state.get_expert_tensor_and_model_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def _overwritten(
    parts: Sequence[Any],
) -> tuple[list[torch.Tensor], list[MutableMapping[Any, Any]]]:
    """The tensors and the mappings that a step writes to. 16-bit parameters are made from these."""
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
            # The outer one too: of some parameters there may be no state yet.
            mappings += [inner.state, *inner.state.values()]
            if inner is not part.optimizer:
                mappings.append(vars(inner))  # its groups are exchanged in each step
    return tensors, mappings


def _inner(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    """Those that step: a hybrid optimizer has some on the host, and others on the device."""
    if isinstance(optimizer, HybridDeviceOptimizer):
        return list(optimizer.sub_optimizers)
    return [optimizer]


def _found_anywhere(part: Any) -> bool:
    """Whether a rank has found an infinity in the gradients of ``part``, which has a scaler of its
    own."""
    dist.all_reduce(
        part.found_inf, op=dist.ReduceOp.MAX, group=part.get_grad_stats_parallel_group()
    )
    return bool(part.found_inf.item() > 0)


def _forget_gathering(model: Any) -> None:
    """Have forward hooks gather parameters again, as they would after a step.

    Some may have been gathered by the first passes of the next step, or are under way.
    """
    if not model.ddp_config.overlap_param_gather:
        return
    for group in [*model.bucket_groups, *model.expert_parallel_bucket_groups]:
        if group.param_gather_handle is not None:
            group.param_gather_handle.wait()
            group.param_gather_handle = None
        group.param_gather_dispatched = False


def _gather_again(model: Any) -> None:
    """Have each data-parallel rank's share of the parameters on all of them, unless hooks do it."""
    config = model.ddp_config
    if config.use_distributed_optimizer and not config.overlap_param_gather:
        model.start_param_sync()


@contextlib.contextmanager
def _answering(owner: Any, method: str, answer: Any) -> Iterator[None]:
    """Have ``owner.method()`` answer ``answer``; other objects of its class are not touched."""
    assert method not in vars(owner)
    setattr(owner, method, lambda: answer)
    try:
        yield
    finally:
        delattr(owner, method)


class Nesting:
    """Tells Megatron's calls of its own patched methods from those that come from outside."""

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
    """``model.zero_grad_buffer()`` amid a step that holds back reductions: it goes on doing so.

    Stock's leaves each bucket group ready to reduce, as it knows no zeroing but between steps.
    What forward hooks have noted of gathered parameters it does not touch.
    """
    groups = [*model.bucket_groups, *model.expert_parallel_bucket_groups]
    reduces = [group.is_last_microbatch for group in groups]
    stock(model)
    for group, is_last_microbatch in zip(groups, reduces, strict=True):
        group.is_last_microbatch = is_last_microbatch
