"""Configuration of a recipe for a plan, from Megatron's own validated arguments. Many recipes
differ in nothing that a plan depends on; they have one configuration, and are planned once."""

from __future__ import annotations

from dataclasses import replace

from megatron_ext.adapter.dimensions import execution
from megatron_ext.adapter.layers import layers_of_stages
from megatron_ext.adapter.model_bytes import state_of
from megatron_ext.compile.registry import choose
from megatron_ext.cost_model.description import describe
from megatron_ext.cost_model.gpus import GPUS
from megatron_ext.planner.layouts.recompute import LayerRecompute, recompute_options
from scripts.evaluation.recipes.accepting import stock_arguments
from scripts.evaluation.recipes.gains import Configuration
from scripts.evaluation.recipes.recipe import Recipe


class NoEstimate(ValueError):
    """Error: the costs of a recipe's layers are not known."""


def configuration_of(recipe: Recipe) -> Configuration:
    """Return the configuration of ``recipe`` under Megatron's schedule.

    Raises:
        NoEstimate: the costs of its layers are not known.
        ValueError: Megatron refuses the recipe; or its GPU or its number of GPUs is not known.
    """
    if recipe.gpu not in GPUS or recipe.gpus is None:
        raise ValueError(
            "the speed and memory of the recipe's GPU are unknown: "
            f"{recipe.gpu or 'no GPU is named'}"
        )
    args = stock_arguments(recipe)
    for name, value in recipe.dimensions.items():
        if not hasattr(args, name):
            setattr(args, name, value)
    args.vision = recipe.dimensions.get("vision")
    for name in ("freeze_vision_model", "freeze_vision_projection"):
        setattr(args, name, recipe.settings.get(name))
    model = describe(args)
    if not model.is_known or set(model.unknown) & _TOO_MUCH:
        raise NoEstimate(
            f"some layers of the recipe's model are unknown: {', '.join(model.unknown)}"
        )
    if model.why_no_estimate is not None:
        raise NoEstimate(f"no estimate: {model.why_no_estimate}")
    run = execution(args, args.seq_length, args.micro_batch_size)
    ranks = args.pipeline_model_parallel_size
    chunks = args.virtual_pipeline_model_parallel_size or 1
    schedule = "1f1b" if chunks == 1 else f"interleaved:vpp={chunks}"

    def permits(option: LayerRecompute) -> bool:
        changed = {**recipe.settings, **option.arguments}
        try:
            stock_arguments(replace(recipe, settings=changed))
        except ValueError:
            return False
        return True

    rates = GPUS[recipe.gpu].rates(run.precision)
    _, *others = recompute_options(model, run, rates, permits)
    return Configuration(
        model=model,
        execution=run,
        state=state_of(args),
        gpu=recipe.gpu,
        ranks=ranks,
        microbatches=args.global_batch_size // (args.micro_batch_size * args.data_parallel_size),
        schedule=schedule,
        layers=tuple(layers_of_stages(args, choose(schedule).place(ranks))),
        counted=(
            int(args.account_for_embedding_in_pipeline_split),
            int(args.account_for_loss_in_pipeline_split),
        ),
        is_frozen=bool(recipe.settings.get("peft") or recipe.settings.get("freeze_language_model")),
        recompute=tuple(others),
    )


_TOO_MUCH = {"hyper connections"}
