"""Measure how soon `megatron-ext plan` answers for launch commands made from public recipes.

    python -m scripts.benchmarks.plan         thirty recipes and Megatron's examples
    python -m scripts.benchmarks.plan --all   each model, pipeline and number of microbatches
    python -m scripts.benchmarks.plan --recipes 0   the examples alone
    python -m scripts.benchmarks.plan --any-sizes   with other parallel sizes

CPU seconds count from the moment at which Megatron has validated the launch command, in a process
of its own that has imported Megatron, to the first answer and to the last one. Results that other
searches have stored are not used. The exit status is 1 if a first answer took more than 10 CPU
seconds, or a last one more than 60. (--limit sets when the comparison ends.)
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron_ext.cost_model.gpus import GPUS, parse_gpu  # noqa: E402
from megatron_ext.launch.command.launch_words import read_launch  # noqa: E402
from megatron_ext.launch.planner import any_sizes  # noqa: E402
from megatron_ext.launch.planner.launch_plan import plan_launch  # noqa: E402
from megatron_ext.launch.planner.parsed_launch import LaunchRequest  # noqa: E402
from megatron_ext.planner.planning_time import LIMIT, planning  # noqa: E402
from scripts.benchmarks.harness import arguments, print_table  # noqa: E402
from scripts.evaluation.recipes.accepting import argument_values, as_on_gpus, others  # noqa: E402
from scripts.evaluation.recipes.public_form import read_recipes  # noqa: E402
from scripts.evaluation.recipes.recipe import RECIPES, Recipe, read_models, resolve  # noqa: E402

# Flags of a launch that all models have in common.
_LAUNCH = """--train-iters 1000 --lr 1e-4 --eval-interval 1000 --eval-iters 0 --mock-data --bf16
--tokenizer-type NullTokenizer --use-distributed-optimizer --sequence-parallel"""
# Sizes of Megatron's examples and of users' commands by name, with the number of GPUs, all H100.
EXAMPLES = {
    "GPT-3 175B": (
        1024,
        """--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048
        --max-position-embeddings 2048 --vocab-size 51199 --micro-batch-size 1
        --global-batch-size 12288 --tensor-model-parallel-size 8
        --pipeline-model-parallel-size 16""",
    ),
    "Mixtral 8x22B": (
        256,
        """--num-layers 56 --hidden-size 6144 --num-attention-heads 48 --group-query-attention
        --num-query-groups 8 --ffn-hidden-size 16384 --swiglu --disable-bias-linear --num-experts 8
        --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-grouped-gemm
        --expert-model-parallel-size 8 --seq-length 4096 --max-position-embeddings 4096
        --vocab-size 31999 --untie-embeddings-and-output-weights --position-embedding-type rope
        --micro-batch-size 1 --global-batch-size 256 --tensor-model-parallel-size 4
        --pipeline-model-parallel-size 8""",
    ),
    **{
        f"Llama-3 8B, PP {ranks}": (
            32,
            f"""--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention
            --num-query-groups 8 --ffn-hidden-size 14336 --swiglu --disable-bias-linear
            --seq-length 8192 --max-position-embeddings 8192 --vocab-size 128255
            --untie-embeddings-and-output-weights --position-embedding-type rope
            --micro-batch-size 1 --global-batch-size 128 --tensor-model-parallel-size 2
            --pipeline-model-parallel-size {ranks}""",
        )
        for ranks in (2, 4)
    },
}
FIRST, LAST = 10.0, 60.0  # CPU seconds in which the first and the final result of a plan must come
COUNT = 30  # number of recipes that are planned


@dataclass(frozen=True)
class Answers:
    """Answers of a plan, and after how many CPU seconds they came.

    Attributes:
        first: CPU seconds until the first answer.
        last: CPU seconds until the last answer.
        schedule: the recommended schedule.
        is_short: whether the limit of CPU seconds ended the comparison.
        why_none: why there is no answer; empty if there is one.
    """

    first: float = 0.0
    last: float = 0.0
    schedule: str = ""
    is_short: bool = False
    why_none: str = ""


def main(words: Sequence[str] | None = None) -> int:
    given = arguments(
        __doc__,
        words,
        all=(False, "take all recipes"),
        recipes=(COUNT, "how many to take"),
        limit=(0.0, "CPU seconds; 0: as `plan`"),
        any_sizes=(False, "compare other parallel sizes"),
    )
    recipes = distinct_recipes()
    if not given.all:
        recipes = spread(recipes, given.recipes)
    answer = _answers_of_sizes if given.any_sizes else _answers
    limit = given.limit or (any_sizes.LIMIT if given.any_sizes else LIMIT)
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
    made: list[Answers] = []
    jobs = [
        *((recipe.name.partition(":")[2], partial(_of_recipe, recipe)) for recipe in recipes),
        *((name, partial(_of_example, *example)) for name, example in EXAMPLES.items()),
    ]

    def rows() -> Iterator[tuple[str, ...]]:
        for name, request in jobs:
            answers = _in_a_process(partial(answer, request, limit))
            found = answers.why_none or answers.schedule + ", time was over" * answers.is_short
            seconds = f"{answers.first:.1f}", f"{answers.last:.1f}"
            yield name.removesuffix("_config"), *seconds, found
            if not answers.why_none:
                made.append(answers)

    print_table(("launch command", "first, s", "last, s", "verdict"), rows())
    for what, most in (("first", FIRST), ("last", LAST)):
        seconds = [getattr(answers, what) for answers in made]
        print(
            f"{what} answers of {len(made)}: median {statistics.median(seconds):.1f}, worst "
            f"{max(seconds):.1f} of {most:g} CPU seconds"
        )
    return int(any(answers.first > FIRST or answers.last > LAST for answers in made))


def distinct_recipes() -> list[Recipe]:
    """Return a recipe for each model, pipeline and number of microbatches, sorted by the size of
    the step.

    Recipes for GPUs of which nothing is known are omitted.
    """
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
    """Return ``count`` of ``recipes``, evenly spaced in their order.

    The last one, which has the largest step, is among them.
    """
    count = min(count, len(recipes))
    return [recipes[(number + 1) * len(recipes) // count - 1] for number in range(count)]


def microbatches(recipe: Recipe) -> int:
    assert recipe.parallel_copies is not None
    at_once = recipe.parallel_copies * recipe.settings["micro_batch_size"]
    return int(recipe.settings["global_batch_size"] // at_once)


def _of_recipe(recipe: Recipe) -> LaunchRequest:
    assert recipe.gpu is not None
    with as_on_gpus():
        values: dict[str, Any] = argument_values(recipe)
    return LaunchRequest(values=values, world_size=recipe.gpus, gpu=parse_gpu(recipe.gpu))


def _of_example(gpus: int, flags: str) -> LaunchRequest:
    script = str(ROOT / "scripts" / "pretrain_gpt.py")
    nodes = ["torchrun", "--nnodes", str(gpus // 8), "--nproc-per-node", "8"]
    launch = read_launch([*nodes, script, *_LAUNCH.split(), *flags.split()])
    return LaunchRequest(launch=launch, gpu=parse_gpu("h100"))


def _in_a_process(answer: Callable[[], Answers]) -> Answers:
    """Return the result of ``answer`` in a new process, where no cache is filled."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.close(reading)
            with open(writing, "w") as pipe:
                json.dump(vars(answer()), pipe)
            status = 0
        finally:
            sys.stdout.flush()
            os._exit(status)
    os.close(writing)
    with open(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return Answers(**json.loads(text)) if text else Answers(why_none="its process died")


def _answers(request: Callable[[], LaunchRequest], limit: float) -> Answers:
    def schedule() -> str:
        taken = plan_launch(request()).verdict.taken
        return "nothing fits" if taken is None else taken.candidate.schedule

    return _timed(schedule, limit)


def _answers_of_sizes(request: Callable[[], LaunchRequest], limit: float) -> Answers:
    def sizes() -> str:
        best = any_sizes.plan_sizes(request()).best
        return "nothing fits" if best is None else f"{best.candidate.schedule}, {best.title}"

    return _timed(sizes, limit)


def _timed(answer: Callable[[], str], limit: float) -> Answers:
    with planning(limit) as time:
        try:
            found = answer()
        except ValueError as error:
            return Answers(why_none=" ".join(str(error).split())[:80])
        last = time.seconds
    first = last if time.first_answer is None else time.first_answer
    return Answers(first, last, found, time.is_short)


if __name__ == "__main__":
    raise SystemExit(main())
