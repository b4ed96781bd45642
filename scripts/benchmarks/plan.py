"""Measure how soon `megatron-ext plan` answers for launch commands made from public recipes.

    python -m scripts.benchmarks.plan         thirty recipes, from small to large steps
    python -m scripts.benchmarks.plan --all   each model, pipeline and number of microbatches
    python -m scripts.benchmarks.plan --lines 4 --profile

CPU seconds count from the moment at which Megatron has validated the launch command, in a process
of its own that has imported Megatron, to the first answer and to the last one. Results that other
searches have stored are not used. The exit status is 1 if a first answer took more than 10 CPU
seconds, or a last one more than 60. (--limit sets when the comparison ends.)
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron_ext.cost_model.gpus import GPUS, parse_gpu  # noqa: E402
from megatron_ext.launch_planner.launch_plan import plan_line  # noqa: E402
from megatron_ext.launch_planner.parsed_launch import LaunchRequest  # noqa: E402
from megatron_ext.planner.planning_time import LIMIT, planning  # noqa: E402
from scripts.recipes.accepting import argument_values, as_on_gpus, others  # noqa: E402
from scripts.recipes.public_form import read_recipes  # noqa: E402
from scripts.recipes.recipe import RECIPES, Recipe, read_models, resolve  # noqa: E402

FIRST, LAST = 10.0, 60.0  # CPU seconds that an answer may take
LINES = 30


@dataclass(frozen=True)
class Answers:
    """CPU seconds of a plan, and what it found; ``why_none``: there is none."""

    first: float = 0.0
    last: float = 0.0
    schedule: str = ""
    is_short: bool = False
    why_none: str = ""


def main(words: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="not thirty lines alone")
    parser.add_argument("--lines", type=int, default=LINES, help="how many")
    parser.add_argument("--limit", type=float, default=LIMIT, help="CPU seconds")
    parser.add_argument("--profile", action="store_true", help="print where time goes")
    arguments = parser.parse_args(words)
    recipes = distinct_recipes()
    if not arguments.all:
        recipes = spread(recipes, arguments.lines)
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
    made: list[Answers] = []
    print(f"{'recipe':64} pp     m   first    last  verdict", flush=True)
    for recipe in recipes:
        answers = _in_a_process(recipe, arguments.limit, arguments.profile)
        name = recipe.name.partition(":")[2].removesuffix("_config")
        figures = f"{answers.first:6.1f}s {answers.last:6.1f}s"
        found = answers.why_none or answers.schedule + ", time was over" * answers.is_short
        print(
            f"{name:64} {recipe.ranks:2} {microbatches(recipe):5}  {figures}  {found}", flush=True
        )
        if not answers.why_none:
            made.append(answers)
    for what, most in (("first", FIRST), ("last", LAST)):
        seconds = [getattr(answers, what) for answers in made]
        print(
            f"{what} answers of {len(made)}: median {statistics.median(seconds):.1f}, worst "
            f"{max(seconds):.1f} of {most:g} CPU seconds"
        )
    return int(any(answers.first > FIRST or answers.last > LAST for answers in made))


def distinct_recipes() -> list[Recipe]:
    """Recipes whose GPU is known, one of each model, pipeline and number of microbatches; those
    with the smallest steps come first."""
    models = read_models()
    found: dict[tuple[str, int, int, int], Recipe] = {}
    with as_on_gpus():
        for name, raw in read_recipes(RECIPES).items():
            recipe = resolve(name, raw, models, others())
            if recipe.gpu in GPUS and recipe.parallel_copies is not None:
                which = recipe.model, recipe.ranks, recipe.chunks, microbatches(recipe)
                found.setdefault(which, recipe)
    return sorted(found.values(), key=lambda recipe: recipe.ranks * microbatches(recipe))


def spread(recipes: Sequence[Recipe], count: int) -> list[Recipe]:
    """So many of ``recipes``, evenly spread, the largest step among them."""
    count = min(count, len(recipes))
    return [recipes[(number + 1) * len(recipes) // count - 1] for number in range(count)]


def microbatches(recipe: Recipe) -> int:
    assert recipe.parallel_copies is not None
    at_once = recipe.parallel_copies * recipe.settings["micro_batch_size"]
    return int(recipe.settings["global_batch_size"] // at_once)


def _in_a_process(recipe: Recipe, limit: float, profile: bool) -> Answers:
    """Plan in a process that nothing of another plan has warmed."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.close(reading)
            with open(writing, "w") as pipe:
                json.dump(vars(_answers(recipe, limit, profile)), pipe)
            status = 0
        finally:
            sys.stdout.flush()
            os._exit(status)
    os.close(writing)
    with open(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return Answers(**json.loads(text)) if text else Answers(why_none="its process died")


def _answers(recipe: Recipe, limit: float, profile: bool) -> Answers:
    assert recipe.gpu is not None
    with as_on_gpus():
        values: dict[str, Any] = argument_values(recipe)
    request = LaunchRequest(values=values, world_size=recipe.gpus, gpu=parse_gpu(recipe.gpu))
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    with planning(limit) as time:
        try:
            made = plan_line(request)
        except ValueError as error:
            return Answers(why_none=" ".join(str(error).split())[:80])
        last = time.seconds
    if profile:
        profiler.disable()
        pstats.Stats(profiler).sort_stats("cumulative").print_stats(40)
    taken = made.verdict.taken
    first = last if time.first_answer is None else time.first_answer
    schedule = "nothing fits" if taken is None else taken.candidate.schedule
    return Answers(first, last, schedule, time.is_short)


if __name__ == "__main__":
    raise SystemExit(main())
