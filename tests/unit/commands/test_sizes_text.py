"""Tests of the lines in which `plan --any-sizes` prints its verdict."""

from __future__ import annotations

from dataclasses import replace

from megatron_ext.commands.sizes_text import sizes_lines
from megatron_ext.cost_model.execution import Execution
from megatron_ext.cost_model.gpus import GPUS
from megatron_ext.cost_model.model import Model
from megatron_ext.cost_model.model_memory import TrainingState
from megatron_ext.planner.layouts.estimated import estimated_work
from megatron_ext.planner.layouts.layout import evenly
from megatron_ext.planner.layouts.work import evaluate
from megatron_ext.planner.sizes.sizes import Sizes
from megatron_ext.planner.sizes.sizes_plan import SizedAlternative, SizesPlan
from megatron_ext.planner.verdict import NOTHING, Written

MODEL = Model(
    layers=("*-",) * 8,
    hidden_size=1024,
    num_attention_heads=8,
    num_query_groups=8,
    kv_channels=128,
    ffn_hidden_size=4096,
    vocabulary=32_000,
)


def alternative(
    spec: str, seconds: float, sizes: Sizes, not_checked: tuple[str, ...] = ()
) -> SizedAlternative:
    work = estimated_work(
        MODEL,
        Execution(sequence=2048),
        TrainingState(),
        GPUS["h100"].rates(),
        ranks=2,
        microbatches=8,
    )
    made = evaluate(work, spec, evenly(8, 4 if spec == "zb-v" else 2), search=False)
    return SizedAlternative(
        made.candidate,
        seconds,
        lambda: NOTHING,
        sizes=sizes,
        title=sizes.text(8),
        recompute="none",
        passes=0.8 * seconds,
    )


OWN = alternative("1f1b", 10.0, Sizes(2, 2))
CONTROL = alternative("1f1b", 9.0, Sizes(1, 2))
BEST = alternative("zb-v", 8.1, Sizes(1, 2, micro_batch=2))


def text(plan: SizesPlan) -> str:
    lines = list(sizes_lines(plan))
    assert sum(line.count("\n") + 1 for line in lines) <= 10
    return "\n".join(lines)


def test_what_our_schedules_add_stands_apart() -> None:
    plan = SizesPlan("job", OWN, OWN, CONTROL, BEST, written=Written(("--a",)), command="torchrun")
    made = text(plan)
    assert "now:        job: 10 s a step" in made
    assert "your sizes: unchanged" in made
    assert "control:    PP 2 x DP 4, micro-batch 1, under 1f1b: 9 s a step" in made
    assert "19.0% shorter" in made
    assert "ours add:   10.0% of the control's step" in made
    assert made.endswith("write:\ntorchrun")


def test_nothing_added_is_said() -> None:
    made = text(SizesPlan("job", OWN, OWN, CONTROL, CONTROL, command="torchrun"))
    assert "any:        as the control" in made
    assert "ours add:   nothing to the control" in made


def test_job_that_is_best_is_kept() -> None:
    made = text(SizesPlan("job", OWN, OWN, OWN, OWN))
    assert "verdict:    keep it" in made
    assert "write" not in made


def test_unchecked_parts_are_named_with_the_answers_that_rest_on_them() -> None:
    """`plan --any-sizes` names the parts of its estimate that no measurement has checked, with each
    answer that depends on them. An answer with context parallelism used to be printed without such
    a remark."""
    best = replace(BEST, not_checked=("context parallelism", "offload"))
    control = replace(CONTROL, not_checked=("context parallelism",))
    own = replace(OWN, not_checked=("experts across nodes",))
    made = text(SizesPlan("job", own, own, control, best, checked=CONTROL, command="torchrun"))
    (line,) = (line for line in made.splitlines() if line.startswith("unchecked:"))
    assert "experts across nodes (now); context parallelism (control, any); offload (any)" in line
    assert "checked:    PP 2 x DP 4" in made
    assert "unchecked" not in text(SizesPlan("job", OWN, OWN, CONTROL, BEST, command="torchrun"))


def test_large_gain_is_doubted_with_its_causes() -> None:
    best = replace(BEST, seconds=7.0, passes=5.6)
    made = text(SizesPlan("job", OWN, OWN, CONTROL, best, command="torchrun"))
    assert "doubt it:" in made
    assert "computes for 8 s of a step now, for 5.6 s then" in made
    assert "doubt it:" not in text(SizesPlan("job", OWN, OWN, CONTROL, BEST, command="torchrun"))


def test_gain_within_its_spread_says_so() -> None:
    near = SizesPlan("job", OWN, OWN, CONTROL, CONTROL, command="torchrun")
    far = SizesPlan("job", OWN, OWN, CONTROL, BEST, command="torchrun")
    assert near.spread is not None and near.spread.is_within
    assert "spread:     the gain may be none" in text(near)
    assert far.spread is not None and not far.spread.is_within
    assert "spread:" not in text(far)
    assert SizesPlan("job", OWN, OWN, OWN, OWN).spread is None
