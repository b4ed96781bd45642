"""Costs of a training job's microbatch, computed by one function for all callers.

`of_arguments` describes a job before its model is built, `of_built` at its first step. Equal jobs
have equal costs, so the same programs and the same verdict on a memory limit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.core.transformer import TransformerConfig

from megatron_ext.adapter.dimensions import equal_costs, execution, rates, rates_in_file
from megatron_ext.adapter.layers import depths_of_stages, layers_of_stages
from megatron_ext.adapter.model_parts import ChunkSize
from megatron_ext.compile.output_layer import with_input_gradient
from megatron_ext.config import CostsSource, flag
from megatron_ext.cost_model.description import describe
from megatron_ext.cost_model.estimate import estimate
from megatron_ext.cost_model.execution import Execution
from megatron_ext.cost_model.frozen import without_frozen
from megatron_ext.cost_model.links import with_links
from megatron_ext.cost_model.measured.layer_costs import Basis
from megatron_ext.cost_model.model import SYMBOLS, Model, Stage, stages_of
from megatron_ext.cost_model.rates import Rates
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.rank_speeds import RankSpeeds, at_speeds

_REMEDY = "--pipeline-costs profile measures them (of install: costs='profile')"
_FEW = 0.005  # largest share of a stage's parameters that a log line leaves unmentioned

Listener = Callable[[str], object]


@dataclass(frozen=True)
class Layers:
    """Layers of a training job as Megatron's arguments describe them, and how a microbatch runs
    them.
    """

    model: Model
    stages: tuple[Stage, ...]
    execution: Execution


@dataclass(frozen=True)
class Trained:
    """Shares of a model that are trained, known only of a model that is built.

    Attributes:
        matrices: for each stage, the trained share of its layers' matrices.
        reached: the share of the first stage's layers that needs gradients.
        output_layer: whether the output layer is trained.
    """

    matrices: tuple[float, ...]
    reached: float = 1.0
    output_layer: bool = True

    @property
    def is_all(self) -> bool:
        """Whether the model is trained as a whole, without frozen parts."""
        return (
            self.output_layer and self.reached == 1 and all(share == 1 for share in self.matrices)
        )


@dataclass(frozen=True)
class Job:
    """Training job from which costs are estimated.

    Attributes:
        name: the model's class, named in messages.
        counts: the number of layers of each stage; None for a stage without known layers.
        layers: the model's layers and how a microbatch runs them; None if the work of some layer is
            not known.
        context_parallel: ranks that share each sequence.
        ranks: ranks of the launch, on all nodes.
        stride: distance from one pipeline rank to the next, in ranks.
        is_looked_up: whether the output layer uses the embedding table of its own stage.
        other_shares: by stage, the share of its parameters outside its language model, if any.
    """

    placement: Placement
    counts: tuple[int | None, ...]
    layers: Layers | None
    trained: Trained
    context_parallel: int
    ranks: int
    stride: int
    is_looked_up: bool
    name: str = "the model"
    other_shares: tuple[tuple[int, float], ...] = ()


def of_arguments(args: Any, placement: Placement, stages: Sequence[Stage] | None = None) -> Job:
    """Return the training job that Megatron's parsed ``args`` describe.

    Args:
        stages: the layers of each stage; None splits the layers as Megatron's options do.

    Raises:
        ValueError: the layers cannot be split over the stages.
    """
    model, layers = describe(args), None
    depths = depths_of_stages(args) or [args.mtp_num_layers or 0]
    if stages is None:
        counts = layers_of_stages(args, placement)
    else:
        counts = [len(stage.layers) for stage in stages]
    if _are_known(model.layers):
        run = execution(args, args.seq_length, args.micro_batch_size)
        layers = Layers(
            model, tuple(stages or stages_of(model, counts, depths_of_stages(args))), run
        )
    stride = args.world_size // args.pipeline_model_parallel_size
    if args.use_tp_pp_dp_mapping:
        stride = args.tensor_model_parallel_size * args.context_parallel_size
    is_tied = not args.untie_embeddings_and_output_weights
    trained = Trained((1.0,) * placement.stages)
    if model.is_frozen:
        trained = Trained((0.0,) * placement.stages, output_layer=False)
    return Job(
        placement,
        tuple(counts),
        layers,
        trained,
        args.context_parallel_size,
        args.world_size,
        stride,
        is_looked_up=is_tied and depths[-1] > 0,
    )


def of_built(
    config: Any,
    placement: Placement,
    per_stage: Sequence[ChunkSize],
    sequence: int,
    micro_batch: int,
    ranks: int,
    stride: int,
) -> Job:
    """Return the training job of a model that is built already.

    Args:
        config: Megatron's config of the model, or the caller's own.
        per_stage: sizes of the model chunk on each stage.
        sequence: tokens of a sample.
        micro_batch: samples of a microbatch.
        ranks, stride: as in `Job`.
    """
    first, last = per_stage[0], per_stage[-1]
    shares = {
        stage: size.other_parameters / size.parameters
        for stage, size in enumerate(per_stage)
        if size.other_parameters > _FEW * size.parameters
    }
    return Job(
        placement,
        tuple(size.layers for size in per_stage),
        _layers_built(config, per_stage, sequence, micro_batch, ranks),
        Trained(
            tuple(size.trained_matrices for size in per_stage), first.reached, last.head_is_trained
        ),
        config.context_parallel_size,
        ranks,
        stride,
        last.head_is_looked_up,
        first.model,
        tuple(shares.items()),
    )


def job_costs(
    source: CostsSource,
    job: Job,
    slices: int,
    tell: Listener | None = None,
    speeds: RankSpeeds | None = None,
) -> Costs:
    """Return the costs of a microbatch of ``job``.

    ``source`` tells whether they are measured, read from a file or estimated.

    Args:
        slices: the number of slices of a sequence.
        tell: receives a line about parts of the model that the estimate ignores.
        speeds: speeds of the pipeline ranks; None if all are equally fast.

    Raises:
        ValueError: ``source`` cannot be parsed, there are more or fewer ``speeds`` than ranks, or
            sequences are cut into slices and the share of attention is neither in ``source`` nor
            estimated.
    """
    measured = None if source.file is None else rates_in_file(source.file, job.counts)
    if source.is_estimate or measured is not None:
        # A training that measures its costs logs nothing about the estimate, since measured costs
        # soon replace it.
        costs = _estimated(job, slices, measured, None if source.profile else tell)
    else:
        costs = parse_costs(source.text, job.placement)
        if slices > 1:
            given, estimated = costs, _estimated(job, slices)
            costs = given.with_slices_of(estimated)
            if estimated.no_estimate and not given.slices.attention:
                raise ValueError(
                    f"{flag('costs')} {source} lacks attention's share of the passes, without "
                    "which the times of slices are unknown, and there is no estimate: "
                    f"{estimated.no_estimate}; add the share, as in "
                    f"f=10,i=12,w=8,comm=1,attention=0.3"
                )
            if tell is not None and costs is not given:
                tell(
                    f"{flag('costs')} {source} does not say what slices take: the shares of "
                    f"attention, and of what each slice takes whatever its length, are estimated"
                )
    if slices > 1:
        costs = costs.with_slices_shared_by(job.context_parallel)
    if speeds is not None:
        ranks = speeds.of_ranks(job.placement.ranks, flag("rank_speeds"))
        costs = at_speeds(costs, job.placement, ranks)
    return with_input_gradient(costs) if job.is_looked_up else costs


def basis_of(job: Job) -> Basis | None:
    """Return the basis for deriving each layer's time from measured stages.

    Return None if the language model has frozen parts, or if parts outside it are more than an
    encoder on the first stage.
    """
    layers = job.layers
    if layers is None or not job.trained.is_all or job.is_looked_up:
        return None
    with_others = [stage for stage, _ in job.other_shares]
    if with_others not in ([], [0]):
        return None
    run = layers.execution
    has_tower = with_others == [0]
    return Basis(layers.model, layers.stages, run, rates(run.precision), has_tower)


def _estimated(
    job: Job, slices: int, measured: Rates | None = None, tell: Listener | None = None
) -> Costs:
    """Return the estimated costs of ``job``; equal costs for all passes if layers are unknown."""
    layers = job.layers
    if layers is None:
        if tell is not None:
            tell(
                f"the costs of {job.name} cannot be estimated, and are taken as equal for every "
                f"stage; {_REMEDY}"
            )
        return equal_costs(job.placement)
    if job.other_shares and tell is not None:
        others = ", ".join(f"{share:.0%} of stage {stage}" for stage, share in job.other_shares)
        tell(
            f"the costs of {job.name} are estimated from its language model, and ignore the "
            f"parameters outside it ({others}); {_REMEDY}"
        )
    why = layers.model.why_no_estimate
    if why is not None and measured is None and tell is not None:
        tell(
            f"no estimate of the costs of {job.name}: {why}. The schedule is made for the costs of "
            f"plain attention; {_REMEDY}"
        )
    reached = measured or rates(layers.execution.precision)
    costs = estimate(layers.model, layers.stages, layers.execution, reached, slices)
    costs = with_links(costs, job.placement, reached, job.ranks, job.stride)
    trained = job.trained
    return without_frozen(
        costs, trained.matrices, reached=trained.reached, output_layer=trained.output_layer
    )


def _layers_built(
    config: Any, per_stage: Sequence[ChunkSize], sequence: int, micro_batch: int, ranks: int
) -> Layers | None:
    """Return the layers of a built model; None if they are unknown or not Megatron's."""
    counts = [size.layers for size in per_stage if size.layers is not None]
    is_megatrons = isinstance(config, TransformerConfig)
    if not is_megatrons or len(counts) < len(per_stage) or not any(counts):
        return None
    rows = sum(size.rows for size in per_stage) * config.tensor_model_parallel_size
    settings = copy.copy(config)
    vars(settings).update(per_stage[0].settings)
    model = describe(settings, rows)
    symbols = model.layers
    # The TransformerConfig of a hybrid model does not give the types of its layers.
    if any(size.symbols for size in per_stage):
        symbols = tuple("".join(size.symbols for size in per_stage))
    # The chunks have more or fewer layers than the config describes, but all layers are of one
    # type.
    elif sum(counts) != len(symbols) and len(set(symbols)) == 1:
        symbols = symbols[:1] * sum(counts)
    if sum(counts) != len(symbols) or not _are_known(symbols):
        return None
    model = replace(model, layers=symbols)
    of_stages = [size.unkept for size in per_stage if size.layers]
    run = replace(
        execution(config, sequence, micro_batch),
        unkept=frozenset.intersection(*of_stages),
        pipeline_span=ranks,
    )
    return Layers(model, stages_of(model, counts, depths_of_stages(config)), run)


def _are_known(layers: Sequence[str]) -> bool:
    return set("".join(layers)) <= SYMBOLS
