"""Tests that the command `doctor` predicts what a random launch does: train, or end in one line.

Of a hundred launch commands that were drawn by hand, doctor used to call five right that ended with
an error in their first step or first evaluation.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.helpers.combinations import at_night
from tests.helpers.megatron_runs import losses, model_flags, train_or_fail
from tests.patches.launch.test_one_judgement import by_doctor, launch_of_words

Flags = dict[str, Any]

_SCHEDULES = ("1f1b", "zb-h1", "zb-1p", "zb-v", "v-half", "1f1b-v", "gis", "interleaved-zb")
_DRAWS = range(100)
_BY_DAY = (0, 3)


def drawn(seed: int) -> tuple[int, Flags]:
    """Draw a number of ranks and the flags of a tiny model, which may be valid or not."""
    draw = random.Random(seed)

    def perhaps(chance: float, **flags: Any) -> Flags:
        return flags if draw.random() < chance else {}

    pipeline = draw.choice((2, 2, 4))
    flags: Flags = {
        "pipeline_model_parallel_size": pipeline,
        "num_layers": draw.choice((4, 8, 8, 6)),
        "micro_batch_size": draw.choice((1, 1, 2)),
        "global_batch_size": draw.choice((1, 2, 3, 4, 6, 8)),
        "train_iters": 2,
        "transformer_impl": "local",
        "untie_embeddings_and_output_weights": draw.choice((True, None)),
        **perhaps(0.3, eval_iters=1, eval_interval=1),
        **perhaps(0.2, eval_global_batch_size=draw.choice((1, 2, 4))),
        **perhaps(0.3, bf16=True),
        **perhaps(0.2, use_distributed_optimizer=True),
        **perhaps(0.2, num_query_groups=draw.choice((1, 2, 3)), group_query_attention=True),
        **perhaps(0.2, step_batch_size_schedule="0:2 64:4", global_batch_size=None),
    }
    flags |= perhaps(0.15, recompute_granularity="selective")
    full = {"recompute_granularity": "full", "recompute_method": "uniform"}
    flags |= perhaps(0.15, **full, recompute_num_layers=1)
    if draw.random() < 0.2:
        flags |= {
            "num_experts": draw.choice((2, 4)),
            "moe_router_topk": draw.choice((1, 2, 3)),
            "expert_model_parallel_size": draw.choice((1, 2)),
            "moe_token_dispatcher_type": "alltoall",
            "disable_bias_linear": True,
        }
    if draw.random() < 0.3:
        chunks = draw.choice((2, 2, 3))
        flags |= {"num_virtual_stages_per_pipeline_rank": chunks}
        flags |= perhaps(0.4, microbatch_group_size_per_virtual_pipeline_stage=draw.choice((2, 4)))
        schedules: Sequence[str] = ("interleaved", "interleaved-zb")
    else:
        flags |= perhaps(0.15, pipeline_model_parallel_layout=draw.choice(_LAYOUTS[pipeline]))
        schedules = _SCHEDULES
    if draw.random() < 0.6:
        flags["pipeline_schedule"] = draw.choice(schedules)
        flags |= perhaps(0.2, pipeline_vocab_parallel=draw.choice((1, 2)))
        flags |= perhaps(0.2, pipeline_memory_limit=draw.choice(("1x", "0.5x", "3", "1MiB")))
        flags |= perhaps(0.15, pipeline_p2p="batched")
        flags |= perhaps(0.15, pipeline_recompute=draw.choice(("first:1", "first:9", "fit")))
        flags |= perhaps(0.1, pipeline_activation_offload=draw.choice(("half", "full", "fit")))
        flags |= perhaps(0.15, pipeline_slices=draw.choice((2, 4)))
    more = 2 if flags.get("expert_model_parallel_size") == 2 and draw.random() < 0.7 else 1
    return pipeline * more, flags


_LAYOUTS = {
    2: ("Ettt|tL", "Etttttt|ttL", "Ett|tt|tt|ttL", "Etttt|ttttL"),
    4: ("Ett|tt|tt|ttL", "Etttt|t|t|ttL", "Et|t|t|tL", "Ett|t|t|L"),
}


@pytest.mark.parametrize("seed", [*_BY_DAY, *at_night(*(n for n in _DRAWS if n not in _BY_DAY))])
def test_doctor_says_what_the_launch_does(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, flags = drawn(seed)
    words = model_flags(**flags)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        whys = by_doctor(launch_of_words(ranks, words)).whys
    results = train_or_fail(ranks, words)
    errors = [result.error for result in results if result.error]
    assert bool(errors) == bool(whys), f"{ranks} {words}: {whys or errors[0][-2000:]}"
    if errors and "SystemExit: 2" in errors[0]:
        assert all("Traceback" not in result.stderr for result in results)
    if not errors:
        runs = [result.value for result in results if result.value is not None]
        assert len(losses(runs)) == 2
