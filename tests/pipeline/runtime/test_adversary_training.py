"""Tests of whole trainings on ranks whose simulated device blocks or finishes late
(`tests.helpers.adversary`).

The losses and states must equal those of the same training without such a device, to the last bit.
The cases pair schedules, kinds of messages, split vocabularies and offload as far as they go
together. Post-validation meets all schedules that gain from it; the gradients of some of its steps
are clipped, so that a step that was taken already must be rolled back.
"""

from __future__ import annotations

import functools
import itertools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_ext.features.offload.runtime import offload
from megatron_ext.schedule.problem import P2P, Offload, VocabularyParallel
from tests.helpers.adversary import MODES, Synchronising, synchronising
from tests.helpers.combinations import IS_NIGHT, at_night
from tests.helpers.megatron_runs import Run, losses, model_flags, train

SCRIPT = Path(__file__).parents[1] / "scripts" / "pretrain_gpt_with_bad_gradients.py"
RANKS = 3  # three ranks, so that one is neither the first nor the last
CLIPPED = {3: 100.0, 5: 100.0}  # factors of the gradients, by iteration
COSTS = "f=10,i=12,w=8,comm=1,d2h=3,h2d=3"

LINES_AND_VS = ("1f1b", "zb-2p", "zb-v", "v-half")
LOOPS = ("interleaved", "gis")
VALIDATED = ("zb-2p", "zb-v")
WAYS = (Offload.NONE, Offload.HALF, Offload.FULL)


@dataclass(frozen=True)
class Case:
    schedule: str
    p2p: P2P = P2P.ASYNC
    vocabulary: VocabularyParallel = VocabularyParallel.NONE
    leaves: Offload = Offload.NONE
    validates: bool = False

    @property
    def iterations(self) -> int:
        """Number of iterations. Post-validation checks steps from the third on."""
        return 6 if self.validates else 2

    def __str__(self) -> str:
        settings = f"{self.schedule}, {self.p2p}, vocabulary {self.vocabulary}"
        return f"{settings}, offload {self.leaves}{', post-validation' * self.validates}"


def _cases() -> list[tuple[Case, str]]:
    """Return each schedule with each kind of messages and of vocabulary that goes with it. Offload
    and the simulated devices take turns in these cases."""
    modes = list(MODES)
    cases = []
    for number, schedule in enumerate((*LINES_AND_VS, *LOOPS)):
        divided = [VocabularyParallel.ONE, VocabularyParallel.TWO]
        if schedule in LOOPS:
            divided = [VocabularyParallel.NONE] * 2
        ways = [(P2P.BATCHED, VocabularyParallel.NONE), *((P2P.ASYNC, how) for how in divided)]
        for turn, (p2p, vocabulary) in enumerate(ways):
            case = Case(schedule, p2p, vocabulary, WAYS[(number + turn) % len(WAYS)])
            cases.append((case, modes[(number + turn) % len(modes)]))
        if schedule in VALIDATED:
            cases.append((Case(schedule, validates=True), modes[number % len(modes)]))
    return cases


CASES = _cases()
# By day only zb-v without a split vocabulary runs here: test_adversary.py has linear placements and
# split vocabularies.
BY_DAY = [
    (case, mode)
    for case, mode in CASES
    if case.schedule == "zb-v" and case.vocabulary is VocabularyParallel.NONE
]


def test_any_two_settings_that_go_together_meet() -> None:
    met = {
        pair
        for case, mode in CASES
        for pair in itertools.combinations(
            (case.schedule, case.p2p, case.vocabulary, case.leaves, case.validates, mode), 2
        )
    }
    divided = VocabularyParallel.ONE, VocabularyParallel.TWO
    wanted = {
        *itertools.product((*LINES_AND_VS, *LOOPS), WAYS),
        *itertools.product((*LINES_AND_VS, *LOOPS), P2P),
        *itertools.product(LINES_AND_VS, divided),
        *itertools.product(P2P, WAYS),
        *itertools.product(divided, WAYS),
        *itertools.product(VALIDATED, [True]),
        *itertools.product((*LINES_AND_VS, *LOOPS, *P2P, *divided, *WAYS, True), MODES),
    }
    assert wanted <= met


def run(case: Case, replicas: int = 1, **more: object) -> list[Run]:
    flags = model_flags(
        pipeline_model_parallel_size=RANKS,
        num_layers=2 * RANKS,
        global_batch_size=2 * RANKS * replicas,
        untie_embeddings_and_output_weights=True,
        train_iters=case.iterations,
        clip_grad=10.0,  # above the gradient norms of all steps but the scaled ones
        log_interval=10,  # steps whose losses are logged do not overlap
        no_check_for_nan_in_loss_and_grad=True,
        rerun_mode="disabled",
        pipeline_costs=COSTS,
        pipeline_schedule=case.schedule,
        pipeline_p2p=case.p2p,
        pipeline_vocab_parallel=case.vocabulary,
        pipeline_activation_offload=case.leaves,
        pipeline_post_validation=case.validates,
        **more,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BAD_GRADIENTS", json.dumps(CLIPPED))
        patch.setattr(offload, "SMALL", 0)
        return train(RANKS * replicas, flags, SCRIPT)


@functools.cache
def undisturbed(case: Case) -> list[Run]:
    return run(case)


@pytest.mark.parametrize(
    ("case", "mode"),
    list(itertools.product(dict(CASES), MODES)) if IS_NIGHT else BY_DAY,
    ids=str,
)
def test_training_is_the_same_to_the_last_bit(case: Case, mode: str) -> None:
    # The kind of messages and offload do not change a number, so the reference runs without them.
    expected = undisturbed(replace(case, p2p=P2P.ASYNC, leaves=Offload.NONE))
    with MODES[mode]():
        runs = run(case)
    assert len(losses(runs)) == case.iterations
    assert losses(runs) == losses(expected)
    assert [rank.state for rank in runs] == [rank.state for rank in expected]
    assert max(rank.redone for rank in runs) == (len(CLIPPED) if case.validates else 0)


@pytest.mark.parametrize("schedule", ["zb-v", *at_night("1f1b")])
def test_pipelines_that_reduce_gradients_between_passes(
    schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pipelines reduce gradients between passes. The simulated device of each rank blocks
    before a pass until the other pipeline has reached the same pass, and nothing hangs."""
    overlaps = {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    }
    both = functools.partial(run, Case(schedule), replicas=2, **overlaps)
    expected = both()
    post_foreign = Synchronising.post_foreign

    def noted(adversary: Synchronising, work: Any) -> Any:
        (tmp_path / str(dist.get_rank())).touch()
        return post_foreign(adversary, work)

    monkeypatch.setattr(Synchronising, "post_foreign", noted)
    with synchronising():
        runs = both()
    assert len(list(tmp_path.iterdir())) == 2 * RANKS, "nothing was reduced or gathered meanwhile"
    assert losses(runs) == losses(expected)
    assert [rank.state for rank in runs] == [rank.state for rank in expected]
