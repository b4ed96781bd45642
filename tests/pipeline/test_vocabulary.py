"""Vocabulary parallelism on real ranks, over gloo, against the same model in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from megatron_ext.runtime.weight_gradients import queue  # noqa: E402
from megatron_ext.schedule.schedule import VocabularyParallel  # noqa: E402
from megatron_ext.schedule.verify import Program  # noqa: E402
from tests.pipeline.stages import world  # noqa: E402
from tests.pipeline.vocabulary import (  # noqa: E402
    VOCABULARY,
    Model,
    VocabularyPipeline,
    alone,
    program_for,
)
from tests.ranks import run_ranks, values  # noqa: E402

# Of the difference from float64, relative, in the norm of a tensor: so many units in the last place
# for each stage between the embedding and the loss, for each of these rounds some four times.
ULPS_PER_STAGE = 4
ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8}


def error_of(got: Tensor | None, expected: Tensor) -> float:
    assert got is not None
    return float((got.double() - expected).norm() / expected.norm())


def check_step(pipeline: VocabularyPipeline) -> float:
    """Losses and gradients are those of one process; the largest error, in ulps a stage."""
    program, model, rank = pipeline.program, pipeline.model, pipeline.group.rank()
    placement = program.schedule.placement
    microbatches = program.problem.microbatches
    reference = alone(model, placement.stages, microbatches)
    errors = {}
    if rank == placement.rank_of[-1]:
        assert sorted(pipeline.ends.losses) == list(range(microbatches))
        for microbatch, losses in pipeline.ends.losses.items():
            errors[f"loss {microbatch}"] = error_of(losses, reference.losses[microbatch])
    rows = slice(pipeline.shard.first_row, pipeline.shard.first_row + pipeline.shard.rows)
    assert pipeline.shard.rows * placement.ranks == VOCABULARY
    for name in ("embedding", "output"):
        gradient = getattr(pipeline.shard, name).grad
        errors[name] = error_of(gradient, getattr(reference, name)[rows])
    for number, stage in pipeline.stages.items():
        got = torch.cat([each.flatten() for each in stage.gradients])
        errors[f"stage {number}"] = error_of(got, reference.stages[number])
    worst = max(errors.values()) / (ULP[model.dtype] * placement.stages)
    assert worst <= ULPS_PER_STAGE, errors
    return worst


def train(programs: Sequence[Program], models: Sequence[Model]) -> Callable[[int], float]:
    def run(rank: int) -> float:
        worst = 0.0
        for program in programs:
            for model in models:
                pipeline = VocabularyPipeline(program, world(), model)
                pipeline.step()
                assert len(queue) == 0
                worst = max(worst, check_step(pipeline))
        return worst

    return run


BOTH = (VocabularyParallel.ONE, VocabularyParallel.TWO)


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("how", BOTH)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "v-half"])
def test_training(name: str, ranks: int, how: VocabularyParallel, is_tied: bool) -> None:
    programs = [program_for(name, ranks, m, how) for m in (1, 3, 8)]
    models = [Model(dtype, is_tied) for dtype in ULP]
    values(run_ranks(ranks, train(programs, models)))
