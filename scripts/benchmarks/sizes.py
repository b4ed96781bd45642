"""Public recipes with other parallel sizes: what sizes alone gain, and what our schedules add.

    python -m scripts.benchmarks.sizes [--limit SECONDS] [WORD ...]
    python -m scripts.benchmarks.sizes --paper

Each recipe whose name has one of the words (`WORDS` without any) is searched as `plan --any-sizes`
searches a launch command: the same GPUs, global batch, sequence, precision and model, within the
memory of a GPU, or what the recipe itself takes if that is more. Megatron validates all sizes that
are simulated. With ``--paper`` models of the sizes that the controllable-memory
paper trains on A100s (Qi et al. 2024, arXiv:2405.15362) are searched without context parallelism,
which the paper does not have.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from megatron_ext.adapter.layout_arguments import LAYOUT
from megatron_ext.cost_model.assumptions import not_checked
from megatron_ext.cost_model.execution import Execution
from megatron_ext.cost_model.gpus import GPUS, RESERVED_SHARE, USABLE
from megatron_ext.cost_model.model import Model
from megatron_ext.cost_model.model_memory import TrainingState, least_lasting
from megatron_ext.planner.layouts.layout import Layout, evenly
from megatron_ext.planner.layouts.recompute import LayerRecompute, recompute_options
from megatron_ext.planner.layouts.work import evaluate
from megatron_ext.planner.planning_time import planning, start_planning_time
from megatron_ext.planner.sizes.estimated import Estimator
from megatron_ext.planner.sizes.job import SizedJob
from megatron_ext.planner.sizes.search import (
    CandidateKind,
    Found,
    SizedStep,
    SizedWorks,
    adds_unchecked,
    described_works,
    search_sizes,
)
from megatron_ext.planner.sizes.sizes import Sizes
from megatron_ext.planner.sizes.space import space
from megatron_ext.schedule.placement import line
from megatron_ext.schedule.problem import VocabularyParallel
from scripts.recipes.accepting import OF_PIPELINE, as_on_gpus, stock_arguments
from scripts.recipes.configured import configuration_of
from scripts.recipes.gains import Configuration, work_of
from scripts.recipes.public_form import read_recipes
from scripts.recipes.recipe import RECIPES, Recipe, read_models, resolve

WORDS = (
    *("llama3_70b_pretrain_64gpu_h100_bf16", "llama3_70b_pretrain_64gpu_h100_fp8cs"),
    *("llama31_405b_pretrain_512gpu_h100_bf16", "llama31_405b_sft_128gpu_h100_bf16"),
    *("qwen3_235b_a22b_pretrain_256gpu_h100_bf16_config", "gpt3_175b_pretrain_32gpu_h100_bf16"),
    *("llama3_70b_pretrain_64gpu_b200_bf16", "llama3_70b_pretrain_64gpu_gb200_fp8mx"),
    *("deepseek_v3_pretrain_1024gpu_h100_bf16", "gpt_oss_120b_pretrain_64gpu_h100_bf16"),
    *("llama3_70b_pretrain_32gpu_h100_bf16_config", "qwen25_32b_pretrain_16gpu_h100_bf16"),
    *("llama3_70b_pretrain_256gpu_h100_bf16_64k", "llama31_405b_pretrain_256gpu_h100_bf16_config"),
    *("gemma2_27b_pretrain_16gpu_h100_bf16", "qwen2_72b_pretrain_32gpu_h100_bf16"),
    *("llama31_405b_pretrain_128gpu_b200_bf16", "llama31_405b_pretrain_1024gpu_h100_fp8cs"),
    *("glm45_355b_pretrain_128gpu_h100_bf16", "deepseek_v2_pretrain_128gpu_h100_bf16"),
    *("kimi_k2_pretrain_256gpu_b200_bf16", "qwen3_235b_a22b_pretrain_64gpu_b200_bf16"),
    *("llama31_405b_pretrain_256gpu_gb200_fp8mx", "deepseek_v3_pretrain_256gpu_gb300_fp8mx_config"),
    *("qwen3_32b_sft_16gpu_h100_bf16", "qwen3_30b_a3b_sft_8gpu_h100_bf16"),
    *("llama3_70b_sft_32gpu_h100_bf16", "gpt_oss_20b_pretrain_16gpu_h100_bf16"),
    *("llama3_70b_pretrain_64gpu_gb300_nvfp4", "qwen3_next_80b_a3b_pretrain_32gpu_h100_bf16"),
)
COLUMNS = ("recipe", "its sizes", "s", "same sizes", "control", "any", "ours add", "best sizes")


@dataclass(frozen=True)
class Row:
    """Times by which each best step is shorter than the recipe's own."""

    job: SizedJob
    own: float
    found: Found

    def best(self, *, only_stock: bool = False, only_checked: bool = False) -> SizedStep | None:
        """Return the best step of a kind."""
        return self.found.best(CandidateKind(self.job, only_stock, only_checked))

    def gain(self, step: SizedStep | None) -> float:
        """Return how many times as long the recipe's own step is; 1 if nothing is shorter."""
        return 1.0 if step is None else max(self.own / step.seconds, 1.0)

    @property
    def same_sizes(self) -> SizedStep | None:
        """The best step with the recipe's own sizes."""
        steps = [step for step in self.found.steps if step.sizes == self.job.own]
        return min(steps, key=lambda step: step.seconds, default=None)


def job_of(configuration: Configuration, recipe: Recipe) -> SizedJob:
    """Return the job of ``recipe``, without a bound of memory."""
    run, gpu = configuration.execution, GPUS[configuration.gpu]
    assert recipe.gpus is not None and gpu.memory is not None
    has_experts = configuration.model.num_experts > 0
    own = Sizes(
        run.tensor_parallel,
        configuration.ranks,
        run.context_parallel,
        run.expert_parallel if has_experts else 1,
        run.expert_tensor_parallel if has_experts else 1,
        run.micro_batch,
        run.sequence_parallel and run.tensor_parallel > 1,
    )
    return SizedJob(
        configuration.model,
        run,
        configuration.state,
        gpu.rates(run.precision),
        own,
        recipe.gpus,
        int(recipe.settings["global_batch_size"]),
        (LayerRecompute.of(run), *configuration.recompute),
    )


def row_of(recipe: Recipe, limit: float) -> Row:
    """Search other sizes for ``recipe``, within ``limit`` CPU seconds.

    Raises:
        ValueError: nothing is known of the recipe, or its weights are frozen.
    """
    configuration = configuration_of(recipe)
    if configuration.is_frozen:
        raise ValueError("its weights are frozen")
    if recipe.settings.get("overlap_moe_expert_parallel_comm"):
        raise ValueError("its passes run in pairs, which require virtual stages")
    job = job_of(configuration, recipe)
    work = work_of(configuration, configuration.execution)
    own = evaluate(work, configuration.schedule, Layout(configuration.layers), search=False)
    memory = GPUS[configuration.gpu].memory
    assert memory is not None
    lasting = least_lasting(own.candidate.variant.model)
    needed = own.fullest + RESERVED_SHARE * (own.fullest - lasting)
    job = replace(job, memory=max(memory, needed / USABLE))
    with planning(limit):
        start_planning_time()
        found = search_sizes(job, partial(_works_of, job, recipe))
    found.steps.append(SizedStep(job.own, own))
    return Row(job, own.seconds, found)


def _works_of(job: SizedJob, recipe: Recipe, sizes: Sizes) -> SizedWorks:
    """Return the works of ``sizes``. Raises ValueError if Megatron refuses them."""
    if sizes != job.own:
        settings = {
            name: value for name, value in recipe.settings.items() if name not in OF_PIPELINE
        }
        layers = len(job.model.layers)
        if layers % sizes.pipeline:
            layout = evenly(layers, sizes.pipeline).text(job.model.mtp_num_layers)
            settings[LAYOUT] = layout
        changed = {
            "tensor_model_parallel_size": sizes.tensor,
            "pipeline_model_parallel_size": sizes.pipeline,
            "context_parallel_size": sizes.context,
            "expert_model_parallel_size": sizes.expert,
            "expert_tensor_parallel_size": sizes.expert_tensor if job.model.num_experts else None,
            "micro_batch_size": sizes.micro_batch,
            "sequence_parallel": sizes.sequence_parallel,
        }
        if sizes.tensor == 1:
            settings.pop("tp_comm_overlap", None)
        stock_arguments(replace(recipe, settings={**settings, **changed}))
    return described_works(job, sizes)


def cells(name: str, row: Row) -> tuple[str, ...]:
    """Return the row of a table. A star stands where the estimate of the recipe's own step, or of
    the step compared with it, has parts that are not checked."""

    def times(step: SizedStep | None) -> str:
        if step is None:
            return "-"
        runs = (
            row.job.execution,
            row.job.execution_of(step.sizes, step.made.recompute),
        )
        is_checked = not (any(map(not_checked, runs)) or step.unchecked)
        return f"{row.gain(step):.2f}{'' if is_checked else '*'}"

    gpus = row.job.gpus
    control, best = row.best(only_stock=True), row.best()
    added = row.gain(best) / row.gain(control)
    return (
        name,
        row.job.own.text(gpus),
        f"{row.own:.4g}",
        times(row.same_sizes),
        times(control),
        times(best),
        f"{added:.2f}",
        "" if best is None else f"{best.sizes.text(gpus)}, {best.made.schedule}",
    )


@dataclass(frozen=True)
class Setting:
    """A model of the paper with its GPUs."""

    name: str
    layers: int
    hidden: int
    heads: int
    gpus: int
    samples: int


PAPER = (Setting("38.5B", 62, 7168, 56, 32, 128), Setting("98.5B", 78, 10240, 80, 40, 120))
SEQUENCES = (1024, 4096, 16384)
_VOCABULARY = 50_304


def paper_job(setting: Setting, sequence: int) -> SizedJob:
    """Return a GPT of the paper's time: GELU, tied tables, the distributed optimizer, no CP."""
    memory = GPUS["a100"].memory
    assert memory is not None
    model = Model(
        layers=("*-",) * setting.layers,
        hidden_size=setting.hidden,
        num_attention_heads=setting.heads,
        num_query_groups=setting.heads,
        kv_channels=setting.hidden // setting.heads,
        ffn_hidden_size=4 * setting.hidden,
        vocabulary=_VOCABULARY,
        is_rotary=False,
    )
    run = Execution(sequence=sequence, hidden_dropout=0, attention_dropout=0)
    run = replace(run, pipeline_span=setting.gpus)
    rates = GPUS["a100"].rates()
    return SizedJob(
        model,
        run,
        TrainingState(distributed=True),
        rates,
        Sizes(tensor=8, pipeline=setting.gpus // 8, sequence_parallel=True),
        setting.gpus,
        setting.samples,
        tuple(recompute_options(model, run, rates)),
        memory=memory,
    )


def best_1f1b(job: SizedJob) -> float:
    """Return the seconds of the best step under 1F1B, with any sizes that the paper could have.

    Raises:
        ValueError: none fits.
    """
    estimator = Estimator(job)
    all_sizes = (sizes for sizes in space(job) if not adds_unchecked(job, sizes))
    made = [one for sizes in all_sizes for one in estimator.estimates(sizes) if one.spec == "1f1b"]
    made = sorted((one for one in made if not one.excess), key=lambda one: one.seconds)
    seconds = []
    for one in made[:_TRIED]:
        work = job.work(one.sizes, one.recompute)
        layout = evenly(len(job.model.layers), one.sizes.pipeline)
        with contextlib.suppress(ValueError):
            stages = layout.of(work.model)
            own = work.bytes_of(stages, line(work.ranks), VocabularyParallel.NONE)
            found = evaluate(work, one.spec, layout, room=job.memory_of(own), search=False)
            seconds.append(found.seconds)
    if not seconds:
        raise ValueError("1F1B fits with no sizes")
    return min(seconds)


_TRIED = 16


def paper_cells(setting: Setting, sequence: int, limit: float) -> tuple[str, ...]:
    """Return the row of a table for a model of the paper. Raises ValueError if nothing fits."""
    job = paper_job(setting, sequence)
    of_1f1b = best_1f1b(job)
    with planning(limit):
        start_planning_time()
        found = search_sizes(job, partial(described_works, job))
    row = Row(job, of_1f1b, found)
    control, best = row.best(only_stock=True, only_checked=True), row.best(only_checked=True)
    if best is None:
        raise ValueError("nothing fits")
    return (
        setting.name,
        f"{sequence:,}",
        f"{of_1f1b:.4g}",
        f"{row.gain(control):.2f}",
        f"{row.gain(best):.2f}",
        f"{best.sizes.text(job.gpus)}, {best.made.schedule}",
    )


_PAPER_COLUMNS = ("model", "sequence", "1F1B, any sizes, s", "control", "any", "best")


def print_table(rows: Sequence[tuple[str, ...]]) -> None:
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD", help="Parts of names of recipes.")
    parser.add_argument("--limit", type=float, default=60.0, help="CPU seconds of each search.")
    parser.add_argument("--paper", action="store_true", help="Models of the paper's sizes.")
    options = parser.parse_args()
    if options.paper:
        print_table([_PAPER_COLUMNS, ("-",) * len(_PAPER_COLUMNS)])
        for setting in PAPER:
            for sequence in SEQUENCES:
                try:
                    print_table([paper_cells(setting, sequence, options.limit)])
                except ValueError as error:
                    print(f"{setting.name}, {sequence:,}: {error}", flush=True)
        return
    models = read_models()
    recipes = {
        name.partition(":")[2].removesuffix("_config") + f" ({name.partition('.')[0]})": (name, raw)
        for name, raw in read_recipes(RECIPES).items()
    }
    print_table([COLUMNS, ("-",) * len(COLUMNS)])
    for word in options.words or WORDS:
        for short, (name, raw) in recipes.items():
            if word not in name:
                continue
            try:
                with as_on_gpus():
                    row = row_of(resolve(name, raw, models), options.limit)
            except ValueError as error:
                print(f"{short} is not planned: {error}", flush=True)
                continue
            if not row.found.is_whole or not row.found.steps[1:]:
                print(f"{short}: {row.found.compared} sizes in that time, not all", flush=True)
                continue
            print_table([cells(short, row)])


if __name__ == "__main__":
    main()
