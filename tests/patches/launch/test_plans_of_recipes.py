"""Test at night that `plan` changes nothing in a command that it wrote for a public model, with all
families."""

from __future__ import annotations

import pytest

from tests.helpers.combinations import nightly
from tests.helpers.few_families import only_families, specs_with_few_chunks
from tests.helpers.short_search import shorten_search
from tests.patches.launch.test_one_judgement import (  # noqa: F401  (a fixture among them)
    RECIPES,
    Flags,
    check_that_plan_keeps_what_it_writes,
    launch_of,
    without_gpus,
)

_COUNTED = tuple(f"account_for_{part}_in_pipeline_split" for part in ("embedding", "loss"))


@pytest.mark.timeout(1800)  # the largest case takes ten minutes on a busy machine
@nightly("plans of five families by day")
@pytest.mark.parametrize(("ranks", "flags"), RECIPES, ids=str)
def test_plan_keeps_what_it_wrote_of_recipes(
    ranks: int, flags: Flags, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`plan` of a command that it wrote for a public recipe changes nothing. All families are
    compared except searching loops with more than three chunks. Steps have 16 microbatches, or 2
    for each pipeline rank if that is more, so that all recipes together take a quarter of an
    hour."""
    shorten_search(monkeypatch)
    only_families(monkeypatch, *specs_with_few_chunks())
    pipeline = flags["pipeline_model_parallel_size"]
    replicas = ranks // pipeline // flags["tensor_model_parallel_size"]
    batch = min(flags["global_batch_size"], max(16, 2 * pipeline) * replicas)
    changed: Flags = {"global_batch_size": batch}
    # Llama 3's 126 layers are 128 with the embedding and the loss
    if flags["num_layers"] % pipeline:
        changed |= dict.fromkeys(_COUNTED, True)
    check_that_plan_keeps_what_it_writes(launch_of(ranks, flags | changed))
