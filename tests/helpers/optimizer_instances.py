"""Several instances of Megatron's distributed optimizer, each over some of the replicas."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from megatron_ext.config import PipelineConfig
from megatron_ext.patches import cpu
from megatron_ext.patches.engine import apply
from megatron_ext.patches.megatron.core.distributed.param_and_grad_buffer import started_reductions
from tests.helpers.callers import small_config
from tests.helpers.ranks import run_ranks, values


def use_einops(patch: pytest.MonkeyPatch) -> None:
    """Stand in for einops, with which Megatron groups the ranks of instances, and which may not be
    installed."""
    module = SimpleNamespace(rearrange=_rearrange)
    patch.setattr(parallel_state, "einops", module, raising=False)
    patch.setattr(parallel_state, "HAVE_EINOPS", True)


def _rearrange(ranks: np.ndarray, pattern: str, *, l: int, s: int, u: int) -> np.ndarray:  # noqa: E741
    """Stand in for einops.rearrange, which Megatron uses only here."""
    assert pattern == "(l s u) -> (l u) s"
    return ranks.reshape(l, s, u).swapaxes(1, 2).reshape(l * u, s)


def means_after_a_failed_step(instances: int) -> list[list[float]]:
    """Return the mean gradients of two replicas in the two steps after a failed step. The right
    value is 2. The first step fails while its gradients, which are 100, are being reduced."""

    def on_rank(rank: int) -> list[float]:
        parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=instances)
        settings = DistributedDataParallelConfig(
            overlap_grad_reduce=True,
            use_distributed_optimizer=instances > 1,
            num_distributed_optimizer_instances=instances,
        )
        with apply([*cpu.patches(), *started_reductions.patches(PipelineConfig())]):
            model = DistributedDataParallel(
                small_config(2, 1), settings, torch.nn.Linear(8, 1, bias=False)
            )
            means = []
            for fails in (True, False, False):
                model.zero_grad_buffer()
                (gradient,) = (weight.main_grad for weight in model.parameters())
                gradient += 100.0 if fails else 1.0 + 2 * rank
                model.start_grad_sync()
                if not fails:
                    model.finish_grad_sync()
                    means.append(gradient.mean().item())
        parallel_state.destroy_model_parallel()
        return means

    return values(run_ranks(2, on_rank))
