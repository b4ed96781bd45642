"""The training of a published step, as the estimate needs it: its work, schedule and layout.

A step of Megatron with Transformer Engine has its row's sizes, layout, recompute and dispatcher,
and all other settings of the public recipe that its row names. GPTs on Megatron's local layers are
built from their sizes; papers' trainings are those of papers.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from megatron_ext.cost_model.execution import Execution
from megatron_ext.cost_model.gpus import GPUS
from megatron_ext.cost_model.model_memory import TrainingState
from megatron_ext.planner.candidate import VocabMethod
from megatron_ext.planner.layouts.estimated import estimated_work
from megatron_ext.planner.layouts.layout import Layout
from megatron_ext.planner.layouts.work import Evaluated, Work, evaluate
from scripts.evaluation import papers
from scripts.evaluation.measured import PublishedStep, dense_model
from scripts.evaluation.recipes.accepting import as_on_gpus
from scripts.evaluation.recipes.configured import configuration_of
from scripts.evaluation.recipes.gains import work_of
from scripts.evaluation.recipes.public_form import flat, read_recipes
from scripts.evaluation.recipes.recipe import RECIPES, Recipe, read_models, resolve


@dataclass(frozen=True)
class DescribedTraining:
    """A training under one schedule with one layout.

    Attributes:
        vocabulary: treatment of the embedding and the output layer.
    """

    work: Work
    schedule: str
    layout: Layout
    vocabulary: VocabMethod = VocabMethod.NAIVE

    def predicted(self) -> Evaluated:
        """Return the estimated seconds of a step of the training, and what they consist of."""
        return evaluate(self.work, self.schedule, self.layout, self.vocabulary, search=False)


def training_of(step: PublishedStep) -> DescribedTraining:
    """Return the training that ``step`` measured.

    Raises:
        ValueError: its recipe is unknown, or Megatron refuses its settings.
    """
    if step.cells["recipe"]:
        return _of_recipe(step)
    if step.layers:
        return _of_gpt(step)
    return _of_paper(step)


def _of_gpt(step: PublishedStep) -> DescribedTraining:
    """Return the training of a GPT with learned positions, with one GPU for each pipeline rank.

    In the zero-bubble paper's runs it has dropout and writes the attention matrix to memory. In
    those of vocabulary parallelism it does neither, as their script shows.
    """
    size = step.size
    has_matrix = "unfused attention" in step.framework
    model = dense_model(
        step, add_bias_linear=True, is_rotary=False, max_position_embeddings=size("seq")
    )
    dropout = 0.1 if has_matrix else 0.0
    execution = Execution(
        size("seq"),
        micro_batch=size("mbs"),
        sequence_parallel=False,
        transformer_engine=False,
        local_flash_attention=not has_matrix,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        pipeline_span=step.gpus,
    )
    spec, option = schedule_of(step)
    work = estimated_work(
        model,
        execution,
        TrainingState(),
        GPUS["a100"].rates(),
        ranks=step.pipeline,
        microbatches=step.microbatches,
        steps_overlap=option == "post-validation",
    )
    number = option.removeprefix("vocab ")
    vocabulary = VocabMethod(number) if number != option else VocabMethod.NAIVE
    return DescribedTraining(work, spec, Layout(step.layers), vocabulary)


# The zero-bubble paper's rows zb-h2 are its ZB-2p, an automatic schedule within 2p microbatches.
# For a microbatch between I and W its authors count only the bytes that W needs: 32 h of the
# activation's 34 h + 5 a s bytes (zb_schedules.py in sail-sg/zero-bubble-pipeline-parallelism, tag
# zero-bubble-v0.1.0). Rows zb-h1 are ZB-1p, which has the bubbles of zb-h1 in the paper.
_AUTOMATIC = {"zb-h2": "zb-2p:paper_count=true"}


def schedule_of(step: PublishedStep) -> tuple[str, str]:
    """Return the schedule's spec that ``step`` ran, and the option that its row names after the
    schedule; "" if it names none."""
    name, _, option = step.schedule.partition(" + ")
    return _AUTOMATIC.get(name, name), option


def _of_paper(step: PublishedStep) -> DescribedTraining:
    if step.job not in papers.PAPERS:
        raise ValueError(
            f"row {step.number} of the measured steps: {step.job!r} is neither the name of a "
            "recipe nor given with numbers of layers"
        )
    paper = papers.PAPERS[step.job]
    return DescribedTraining(papers.work_of(paper, step), paper.schedule, Layout(paper.layers))


_PRECISIONS = {"MXFP8": "fp8mx", "FP8": "fp8cs", "NVFP4": "nvfp4", "BF16": "bf16"}


def recipe_of(step: PublishedStep) -> Recipe:
    """Return the recipe that ``step`` names, with the settings of the row in place of its own.

    Raises:
        ValueError: there is no such recipe, or a setting is not understood.
    """
    recipes, cells = _recipes(), step.cells
    name = cells["recipe"]
    if name not in recipes:
        raise ValueError(
            f"row {step.number} of the measured steps: {name!r} is not a recipe of {RECIPES}"
        )
    given = _with_sizes_of(step, flat(recipes[name]))
    # The name of a recipe contains its number of GPUs and its precision.
    model, _, rest = name.partition("gpu_")
    gpu = rest.partition("_")[0]
    precision = _PRECISIONS[cells["precision"]]
    renamed = f"{model.rpartition('_')[0]}_{step.gpus}gpu_{gpu}_{precision}_config"
    return resolve(renamed, given, read_models())


def _with_sizes_of(step: PublishedStep, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's ``settings``, with those that the row of ``step`` has in their place."""
    changes = {
        **_sizes(step),
        **_layout(step, settings),
        **_experts(step),
        **_recompute(step),
        **(_SHORT_MODEL if step.size("layers") == _SHORT else {}),
    }
    words = {key.rpartition(".")[2] for key in changes}
    kept = {key: value for key, value in settings.items() if key.rpartition(".")[2] not in words}
    return kept | {key: value for key, value in changes.items() if value is not None}


def _sizes(step: PublishedStep) -> dict[str, Any]:
    size = step.size
    return {
        "model.tensor_model_parallel_size": size("tp"),
        "model.pipeline_model_parallel_size": step.pipeline,
        "model.virtual_pipeline_model_parallel_size": step.chunks if step.chunks > 1 else None,
        "model.context_parallel_size": size("cp"),
        "model.expert_model_parallel_size": size("ep"),
        "model.seq_length": size("seq"),
        "train.micro_batch_size": size("mbs"),
        "train.global_batch_size": size("gbs"),
    }


def _layout(step: PublishedStep, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the layout of ``step``.

    The recipe's layout is kept only if it has as many stages as the step.
    """
    changes: dict[str, Any] = {}
    stages = [settings.get(f"model.{name}") or 1 for name in _STAGES]
    if step.cells["layout"]:
        changes["model.pipeline_model_parallel_layout"] = step.cells["layout"]
    elif stages != [step.pipeline, step.chunks]:
        changes["model.pipeline_model_parallel_layout"] = None
    if step.chunks == 1:
        changes["model.microbatch_group_size_per_vp_stage"] = None
    return changes


def _experts(step: PublishedStep) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if step.cells["dispatcher"]:
        changes["model.moe_token_dispatcher_type"] = step.cells["dispatcher"]
    if step.cells["a2a_overlap"]:
        is_on = step.cells["a2a_overlap"] == "1"
        changes["comm_overlap.overlap_moe_expert_parallel_comm"] = is_on or None
        if is_on:  # Megatron refuses this overlap together with the overlap of the shared expert
            changes["model.moe_shared_expert_overlap"] = None
    if step.chunks == 1:  # with one chunk per rank no passes can overlap
        changes["comm_overlap.overlap_moe_expert_parallel_comm"] = None
        changes["comm_overlap.delay_wgrad_compute"] = None
    return changes


def _recompute(step: PublishedStep) -> dict[str, Any]:
    """Return the settings of the recompute of ``step``; empty if the row does not tell."""
    granularity, *modules = step.cells["recompute"].replace(",", " ").split() or [""]
    known = [module for module in modules if module in ("mla_up_proj", "mlp")]
    names = ("granularity", "modules", "method", "num_layers")
    changes: dict[str, Any] = {f"model.recompute_{name}": None for name in names}
    if granularity == "none" or _is_both(step):
        return changes
    if granularity == "full":
        recompute = {"granularity": "full", "method": "uniform", "num_layers": 1}
    elif known:
        recompute = {"granularity": "selective", "modules": known}
    else:
        return {}
    return changes | {f"model.recompute_{name}": value for name, value in recompute.items()}


_STAGES = ("pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size")
# Number of layers of the model in Megatron-LM #6311, which has DeepSeek-V3's shape; three layers
# are dense.
_SHORT = 14
# Settings of that model, with Megatron's own defaults instead of the recipe's: optimizer states and
# gradients in fp32.
_SHORT_MODEL: Mapping[str, Any] = {
    "model.num_layers": _SHORT,
    "model.moe_layer_freq": [0] * 3 + [1] * (_SHORT - 3),
    "optimizer.use_precision_aware_optimizer": None,
    "optimizer.main_grads_dtype": None,
    "optimizer.main_params_dtype": None,
    "optimizer.exp_avg_dtype": None,
    "optimizer.exp_avg_sq_dtype": None,
    "ddp.grad_reduce_in_fp32": True,
}


def _is_both(step: PublishedStep) -> bool:
    """Return whether ``step`` recomputes whole layers and overlaps experts' messages.

    Released versions of Megatron refuse this combination.
    """
    return step.cells["recompute"].startswith("full") and step.cells["a2a_overlap"] == "1"


@cache
def _recipes() -> dict[str, Any]:
    return read_recipes(RECIPES)


def _of_recipe(step: PublishedStep) -> DescribedTraining:
    recipe = recipe_of(step)
    with warnings.catch_warnings(), as_on_gpus():
        warnings.simplefilter("ignore")
        configuration = configuration_of(recipe)
    execution = configuration.execution
    # Whether the training ran with one hardware queue is taken from the row's note, not from
    # CUDA_DEVICE_MAX_CONNECTIONS of this process.
    if execution.overlap:
        is_required = max(execution.tensor_parallel, execution.context_parallel) > 1
        is_one = "connections 1;" in step.cells["note"] or is_required
        execution = replace(execution, has_one_queue=is_one)
    if _is_both(step):
        execution = replace(execution, recompute=True)
    work = work_of(configuration, execution)
    if execution.overlap:
        work = replace(work, pairs=True)
    return DescribedTraining(work, configuration.schedule, Layout(configuration.layers))
