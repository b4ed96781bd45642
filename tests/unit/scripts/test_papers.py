"""Tests of the trainings that papers describe, and of their estimated seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_ext.planner.layouts.layout import Layout
from megatron_ext.schedule.action import Kind
from scripts.evaluation.measured import PublishedStep, read_measured
from scripts.evaluation.papers import PAPERS, PaperTraining, copies_of, work_of
from scripts.evaluation.trainings import training_of

STEPS = [step for step in read_measured() if step.job in PAPERS]
# Seconds of an overlapped pair of passes of 4 layers each on DeepSeek's H800s, from the first
# kernel to the last of train.json in https://github.com/deepseek-ai/profile-data.
PAIR = 0.129


def step_of(job: str) -> PublishedStep:
    return next(step for step in STEPS if step.job == job)


def pair_seconds(paper: PaperTraining, step: PublishedStep) -> float:
    """Return the estimated seconds of F and B of the second stage, run as an overlapped pair."""
    costs = work_of(paper, step).variant(paper.schedule, Layout(paper.layers)).problem.costs
    passes = sum(figures[1] for figures in costs.seconds.values())
    return passes - costs.overlap.savings[Kind.FULL_BACKWARD][1][1]


@pytest.mark.parametrize(
    "step",
    [step for step in STEPS if not step.job.endswith(("530B", "1T"))],
    ids=lambda step: f"{step.job}, {step.gpus}",
)
def test_estimated_steps_are_near_published_ones(step: PublishedStep) -> None:
    """Estimated steps are near published ones. The step of Llama 3 405B on 16,384 GPUs used to be
    estimated at twice its published seconds."""
    assert 0.75 <= step.seconds / training_of(step).predicted().seconds <= 1.33


def test_a_pair_of_layers_is_near_its_profile() -> None:
    """The estimate of an overlapped forward and backward pass of a layer is near its profile.
    Without overlap, both passes together would take 1.6 times as long as profiled."""
    paper, step = PAPERS["dsv3 h800"], step_of("dsv3 h800")
    alone = replace(paper, execution=replace(paper.execution, overlap=1e-9))
    assert 0.75 <= PAIR / pair_seconds(paper, step) <= 1.33
    assert pair_seconds(alone, step) > 1.5 * PAIR


def test_stages_have_all_layers_of_the_model() -> None:
    assert {step.job for step in STEPS} == set(PAPERS)
    for step in STEPS:
        paper = PAPERS[step.job]
        assert sum(paper.layers) == len(paper.model.layers)
        assert len(paper.layers) % paper.pipeline == 0
        ranks = paper.execution.tensor_parallel * paper.pipeline
        assert step.gpus % (ranks * paper.execution.expert_parallel) == 0
        assert step.size("gbs") % copies_of(paper, step) == 0
