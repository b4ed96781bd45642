"""Report of the weight gradients that a schedule defers to W, and of those not deferred, with
reasons.

A schedule fills bubbles with W passes of the expected cost. If many weights cannot wait for W,
because of hooks, graphs or layers that do not split, bubbles stay empty, and only this report tells
why.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, override

import torch
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.utils import log_single_rank
from torch import Tensor

from megatron_ext.adapter.model_parts import unused_heads
from megatron_ext.adapter.observers.observer import Step, StepObserver
from megatron_ext.adapter.programs import gather
from megatron_ext.adapter.splitting import Split
from megatron_ext.adapter.step.training_hooks import TrainingHooks
from megatron_ext.adapter.transformer_engine.captured import captured_parameters, captures
from megatron_ext.base.logger import logger
from megatron_ext.config import PipelineConfig
from megatron_ext.runtime.weight_gradients import queue


class SplitReportHooks(TrainingHooks):
    """Hooks that report which weight gradients wait for W passes (--pipeline-report-split)."""

    @override
    @classmethod
    def is_on(cls, ours: PipelineConfig, settings: Any) -> bool:
        return ours.report_split

    @override
    def observers(self) -> Sequence[StepObserver[Step]]:
        return [SplitReport(splits=self._config.splits_backward)]


class SplitReport(StepObserver[Step]):
    """Observer that logs the `split_report` of all ranks once, after a representative step.

    In a race (--pipeline-race) in which a schedule ``splits`` the backward pass, that is the first
    step under such a schedule; with CUDA graphs, the first step that replays them.
    """

    def __init__(self, *, splits: bool) -> None:
        self._splits = splits
        self._is_done = False
        self._begun = 0  # number of steps that have begun

    def begin(self, step: Step) -> None:
        is_wanted = not self._is_done and step.split.waits == self._splits
        # With CUDA graphs the report waits for the end of the warm-up. This depends on settings
        # only, so that all ranks report the same step, even a rank without layers.
        if captures(step.call.config):
            is_wanted = is_wanted and self._begun >= step.call.config.cuda_graph_warmup_steps
        self._begun += 1
        queue.weights = set() if is_wanted else None

    def end(self, step: Step) -> None:
        """Log the report after the first representative step; later calls do nothing.

        Collective over the pipeline after that step.
        """
        if queue.weights is None:
            return
        deferred, queue.weights = queue.weights | step.split.separate_weights, None
        lines = gather(step.pipeline, split_report(step.call.models, deferred, step.split))
        for rank, line in enumerate(lines):
            log_single_rank(logger, logging.INFO, f"pipeline rank {rank}: {line}")
        self._is_done = True


def split_report(
    chunks: Sequence[torch.nn.Module], deferred: Collection[Tensor], split: Split
) -> str:
    """Return a line that tells which weight gradients of ``chunks`` wait for W passes.

    Gradients of the weights in ``deferred`` wait. ``split`` has reasons why others do not. A
    weight's work is counted in its elements: its gradient is a matrix product with two operations
    per element and token, as many as the input's gradient has.
    """
    tables = {
        parameter
        for chunk in chunks
        for module in chunk.modules()
        if isinstance(module, torch.nn.Embedding | VocabParallelEmbedding)
        for parameter in module.parameters(recurse=False)
    }
    unused = unused_heads(chunks)
    captured = captured_parameters(chunks)
    hooked = split.hooks.parameters | split.hooks.of_modules
    waiting = at_once = 0
    reasons: Counter[str] = Counter()
    for name, parameter in (item for chunk in chunks for item in chunk.named_parameters()):
        if parameter in deferred:
            waiting += parameter.numel()
        elif not parameter.requires_grad:
            reasons["frozen"] += 1
        elif parameter.dim() < 2:
            reasons["of one dimension (norms, biases: no matrix product)"] += 1
        elif parameter in split.at_once:
            at_once += parameter.numel()
            reasons[f"output layer ({_why_at_once(parameter in tables)})"] += 1
        elif parameter in unused:
            reasons["output layer's own (it is tied to the embedding, and uses that one's)"] += 1
        elif parameter in tables:
            reasons["of embeddings (no matrix product)"] += 1
        else:
            at_once += parameter.numel()
            alike = re.sub(r"\.\d+\.", ".*.", name.removeprefix("module."))
            why = "its layer is not split, or its input has no gradient"
            if parameter in captured:
                why = "in CUDA graphs"
            elif parameter in hooked:
                why = "hooks of the caller's run in I"
            reasons[f"{alike} ({why})"] += 1
    work = waiting + at_once
    share = waiting / work if work else 0.0
    left = ", ".join(f"{count} {reason}" for reason, count in reasons.items()) or "none"
    return (
        f"W has {share:.1%} of the weights' matrix products, {share / 2:.1%} of the whole "
        f"backward's without attention; parameters without a W: {left}"
    )


def _why_at_once(is_looked_up: bool) -> str:
    if is_looked_up:
        return "multi-token prediction looks up in it, and both come in one sum"
    return "its logits' gradient has no room to be kept until W, or that would gain nothing"
