"""Judgement whether a launch command loads a checkpoint: the whole, its weights alone, or nothing.

Doctor, the plan and the launch all use this judgement. It follows the comparisons that Megatron
makes when it loads, in `megatron.training.checkpointing`: optimizer states that were saved rank by
rank need the same stages on the same ranks; weights, and states that were saved parameter by
parameter (--dist-ckpt-optim-fully-reshardable), need only the same model.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_ext.adapter.checkpoints.folder import iteration_to_load
from megatron_ext.adapter.checkpoints.model_difference import (
    Change,
    ModelDifference,
    model_differences,
)
from megatron_ext.adapter.checkpoints.saved import Incomplete, SavedTraining, read
from megatron_ext.adapter.layers import layers_of_stages
from megatron_ext.base.words import counted
from megatron_ext.config import PipelineConfig
from megatron_ext.cost_model.model_memory import default_bucket
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import VocabularyParallel

# Keys in a checkpoint's metadata. The rank of each stage is written only if the placement differs
# from Megatron's own.
RANK_OF_STAGE = "pipeline_rank_of_stage"
DIVIDED = "pipeline_vocabulary_is_divided"

_KIND = "distrib_optim_sharding_type"
_AS_BEFORE = (
    "train one step under the old command with --dist-ckpt-optim-fully-reshardable and --save, and "
    "load that; or add --no-load-optim, which loads the weights alone"
)
_SCHEDULER = {
    "max_lr": "the learning rate",
    "min_lr": "the smallest learning rate",
    "lr_warmup_steps": "the samples of the warmup",
    "lr_decay_steps": "the samples until the learning rate has decayed",
    "lr_decay_style": "the decay of the learning rate",
    "start_wd": "the weight decay at the start",
    "end_wd": "the weight decay at the end",
    "wd_incr_steps": "the samples of the training (--train-iters x --global-batch-size)",
    "wd_incr_style": "the growth of the weight decay",
}


class Outcome(enum.StrEnum):
    """Outcome of loading the checkpoint that a command names."""

    COMPLETE = "loads completely"
    WEIGHTS = "loads weights only"
    NOT = "does not load"
    NOT_JUDGED = "not judged"


@dataclass(frozen=True)
class LoadJudgement:
    """Judgement of a checkpoint: the outcome of loading it, the reason, and a fix.

    ``fix`` names the flag or the step with which the checkpoint loads; it is empty if nothing has
    to be done. ``remark`` says what Megatron does silently with a checkpoint that it loads.
    """

    outcome: Outcome
    text: str
    fix: str = ""
    remark: str = ""

    def __str__(self) -> str:
        remark = f". {self.remark}" if self.remark else ""
        return self.text + remark + (f": {self.fix}" if self.fix else "")


@dataclass(frozen=True)
class Command:
    """Launch command that loads a checkpoint, with what must fit the checkpoint.

    Attributes:
        args: Megatron's validated arguments.
        placement: the rank of each stage.
        divided: whether the vocabulary is sharded over all pipeline ranks.
        scheduler: state of a new learning-rate schedule; None: not compared.
    """

    args: Any
    placement: Placement
    divided: bool = False
    scheduler: Mapping[str, Any] | None = None


def command_of(
    args: Any, config: PipelineConfig, scheduler: Mapping[str, Any] | None = None
) -> Command:
    """Return the launch command with validated ``args`` and our settings.

    It is to be compared with a checkpoint. If our settings name no schedule, the placement is that
    of Megatron's own schedule.
    """
    placement = _placement(args, None)
    if config.schedule is not None:
        placement = config.resolved_spec.place(args.pipeline_model_parallel_size)
    divided = config.options.vocab_parallel is not VocabularyParallel.NONE
    return Command(args, placement, divided, scheduler)


class DoesNotLoad(ValueError):
    """Error: the launch command does not load the checkpoint; ``fix`` says how to load it."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.fix = fix


class _StatesDoNotLoad(DoesNotLoad):
    """Error: the launch command loads the checkpoint's weights, but not its optimizer states."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason, f"{fix}, or add --no-load-optim, which loads the weights alone")


def judge_loading(command: Command, *, flag: str = "--load") -> LoadJudgement:
    """Return the judgement of the checkpoint that ``flag`` names in the launch ``command``."""
    args = command.args
    folder = args.load if flag == "--load" else args.pretrained_checkpoint
    path = None
    if "://" not in folder:
        path = iteration_to_load(folder, args.ckpt_step if flag == "--load" else None)
    if path is None:
        return LoadJudgement(
            Outcome.NOT_JUDGED,
            f"{flag} {folder} is not judged, since it is not here to be looked at",
        )
    name = f"{flag} {path}"
    try:
        saved = read(path)
    except Incomplete as error:
        fix = "load another iteration (--ckpt-step), or copy this one again"
        return LoadJudgement(Outcome.NOT, f"{name} does not load: {error}", fix)
    except ValueError as error:
        return LoadJudgement(Outcome.NOT_JUDGED, f"{name} is not judged: {error}")
    starts_anew = args.finetune or flag != "--load" or path.name == "release"
    return judge_saved(saved, command, name, starts_anew=starts_anew)


def judge_saved(
    saved: SavedTraining, command: Command, name: str, *, starts_anew: bool
) -> LoadJudgement:
    """Return whether ``command`` loads the checkpoint ``saved``, which errors call ``name``.

    ``starts_anew``: whether only the weights are loaded, as with --finetune.
    """
    args = command.args
    if saved.args is None:
        return LoadJudgement(
            Outcome.NOT_JUDGED, f"{name} is not judged: it has no arguments of Megatron's"
        )
    why_not = _why_not_judged(saved.args, args)
    if why_not:
        return LoadJudgement(Outcome.NOT_JUDGED, f"{name} is not judged: {why_not}")
    weights_alone = why_weights_alone(saved.args, args, starts_anew=starts_anew)
    try:
        found = list(model_differences(saved.args, args))
        _check_format(args)
        _check_weights(found, args)
        if not weights_alone:
            _check_states(saved, command, found)
        if not starts_anew:
            _check_equal_arguments(saved.args, args)
        if not weights_alone:
            _check_scheduler(saved, command)
    except DoesNotLoad as error:
        return LoadJudgement(Outcome.NOT, f"{name} does not load: {error}", error.fix)
    except ValueError as error:  # the checkpoint has layers that we cannot place
        return LoadJudgement(Outcome.NOT_JUDGED, f"{name} is not judged: {error}")
    remark = _remark(saved.args, args, found)
    if weights_alone:
        text = f"{name} loads weights only: {weights_alone}"
        return LoadJudgement(Outcome.WEIGHTS, text, remark=remark)
    text = f"{name} loads whole: weights, optimizer states and learning-rate schedule"
    return LoadJudgement(Outcome.COMPLETE, text, remark=remark)


def _why_not_judged(saved: Any, args: Any) -> str:
    if args.ckpt_format not in ("torch_dist", "torch"):
        return f"--ckpt-format {args.ckpt_format} is not known here"
    if getattr(args, "non_persistent_ckpt_type", None):
        return "--non-persistent-ckpt-type may load another one"
    if args.dist_ckpt_strictness not in ("assume_ok_unexpected", "log_unexpected"):
        return f"--dist-ckpt-strictness {args.dist_ckpt_strictness} compares other things"
    if not hasattr(saved, "num_layers") or not hasattr(saved, "hidden_size"):
        return "its arguments do not describe a model"
    patterns = [getattr(one, "hybrid_layer_pattern", None) for one in (saved, args)]
    if bool(patterns[0]) != bool(patterns[1]):
        return "one of the models is a hybrid model, which Megatron may convert"
    return ""


def why_weights_alone(saved: Any, args: Any, *, starts_anew: bool) -> str:
    """Return the reason why optimizer states are not loaded; "" if they are."""
    if starts_anew:
        return "as of --finetune" if args.finetune else "training starts at iteration 0"
    if args.no_load_optim:
        return "as of --no-load-optim"
    if getattr(saved, "no_save_optim", False):
        return "it was saved with --no-save-optim"
    return ""


def _check_format(args: Any) -> None:
    if args.ckpt_format != "torch_dist":
        raise DoesNotLoad(
            f"--ckpt-format {args.ckpt_format}: the checkpoint is of format torch_dist",
            "write --ckpt-format torch_dist",
        )


def _check_weights(found: list[ModelDifference], args: Any) -> None:
    for difference in found:
        if difference.change is not Change.LESS:
            raise DoesNotLoad(
                str(difference), "train the model that was saved, or load another checkpoint"
            )


def _check_states(saved: SavedTraining, command: Command, found: list[ModelDifference]) -> None:
    _check_optimizer(saved, command.args)
    check_stages(saved, command)
    if not _fits_one_placement(saved):
        return
    kind = saved.metadata.get(_KIND)
    for difference in found:
        raise DoesNotLoad(
            f"the checkpoint's optimizer states ({kind}) fit only the model that was saved: "
            f"{difference}",
            _AS_BEFORE,
        )
    _check_buffers(saved, command.args)


def check_stages(saved: SavedTraining, command: Command) -> None:
    """Raise DoesNotLoad if optimizer states of ``saved`` need stages that ``command`` lacks."""
    if not _fits_one_placement(saved):
        return
    for text in _moves(saved, command):
        kind = saved.metadata.get(_KIND)
        raise DoesNotLoad(
            f"the checkpoint's optimizer states ({kind}) can only be loaded if each stage is on "
            f"the rank that saved it: {text}",
            _AS_BEFORE,
        )


def _fits_one_placement(saved: SavedTraining) -> bool:
    kind = saved.metadata.get(_KIND)
    return kind not in (None, *DistributedOptimizer.checkpoint_fully_reshardable_formats)


def _check_optimizer(training: SavedTraining, args: Any) -> None:
    saved, kind = training.args, training.metadata.get(_KIND)
    if bool(kind) != bool(args.use_distributed_optimizer):
        with_or_without, lacks_or_has = ("with", "lacks") if kind else ("without", "has")
        add_or_drop = "add" if kind else "drop"
        raise _StatesDoNotLoad(
            "--use-distributed-optimizer: the checkpoint's optimizer states were saved "
            f"{with_or_without} this flag, and the command {lacks_or_has} it",
            f"{add_or_drop} --use-distributed-optimizer",
        )
    if _has_expert_optimizer(saved) != _has_expert_optimizer(args):
        raise _StatesDoNotLoad(
            "--expert-model-parallel-size: Megatron gives experts a separate optimizer if their "
            "parallel sizes differ from those of the other layers; either the checkpoint or the "
            "command has such an optimizer, but not the other",
            "write the expert-parallel sizes with which the checkpoint was trained",
        )
    if not kind and _is_mixed(saved) != _is_mixed(args):
        raise _StatesDoNotLoad(
            f"the checkpoint has optimizer states of a training in {saved.params_dtype}, and the "
            f"command trains in {args.params_dtype}",
            "train in the precision in which the checkpoint was trained",
        )
    optimizers = getattr(saved, "optimizer", args.optimizer), args.optimizer
    if optimizers[0] != optimizers[1]:
        raise _StatesDoNotLoad(
            f"--optimizer {optimizers[1]}: the checkpoint has optimizer states of {optimizers[0]}",
            f"write --optimizer {optimizers[0]}, the checkpoint's optimizer",
        )
    for name in ("lr", "min_lr", "decoupled_lr", "decoupled_min_lr"):
        rates = getattr(saved, name, None), getattr(args, name, None)
        if rates[0] != rates[1]:
            flag = "--" + name.replace("_", "-")
            raise _StatesDoNotLoad(
                f"{flag} {rates[1]}: Megatron finds optimizer states by their learning rates, and "
                f"the checkpoint's were saved with {rates[0]}",
                f"write {flag} {rates[0]}, with which the checkpoint was trained",
            )


def _has_expert_optimizer(args: Any) -> bool:
    if not getattr(args, "num_experts", None):
        return False
    tensor_parallel = args.tensor_model_parallel_size
    return args.expert_model_parallel_size > 1 or _expert_tensor_parallel(args) != tensor_parallel


def _expert_tensor_parallel(args: Any) -> int:
    size: int | None = getattr(args, "expert_tensor_parallel_size", None)
    return size or int(args.tensor_model_parallel_size)


def _is_mixed(args: Any) -> bool:
    return bool(args.bf16 or args.fp16)


def _moves(saved: SavedTraining, command: Command) -> Iterator[str]:
    """Yield reasons why stages have other ranks or layers than when the checkpoint was saved."""
    before, args = saved.args, command.args
    then, now = saved.metadata.get(RANK_OF_STAGE), list(command.placement.rank_of)
    rank_of_stage = None if command.placement.in_turn else now
    was_divided = bool(saved.metadata.get(DIVIDED))
    for sizes in _SIZES_OF_RANKS if before is not None else ():
        was, wanted = sizes(before), sizes(args)
        if was != wanted:
            yield f"it had {was}, and the command has {wanted}"
            return
    if (then, was_divided) != (rank_of_stage, command.divided):
        yield (
            f"stages were on {_ranks(then, was_divided)}, and are on "
            f"{_ranks(rank_of_stage, command.divided)}"
        )
        return
    if before is None:
        return
    held = _held(before, _placement(before, then)), _held(args, command.placement)
    for rank, (then_held, now_held) in enumerate(zip(*held, strict=True)):
        if then_held != now_held:
            yield f"pipeline rank {rank} had {_parts(then_held)}, and has {_parts(now_held)}"
            return


_SIZES_OF_RANKS: tuple[Callable[[Any], str], ...] = (
    lambda args: f"TP {args.tensor_model_parallel_size} x PP {args.pipeline_model_parallel_size}",
    lambda args: (
        f"EP {args.expert_model_parallel_size} x ETP {_expert_tensor_parallel(args)}"
        if getattr(args, "num_experts", None)
        else "no experts"
    ),
)


def _ranks(rank_of_stage: list[int] | None, divided: bool) -> str:
    ranks = "Megatron's own ranks" if rank_of_stage is None else f"ranks {rank_of_stage}"
    return ranks + (" with the vocabulary split over all" if divided else "")


def _placement(args: Any, rank_of_stage: list[int] | None) -> Placement:
    """Return the placement of a saved run's stages; Megatron's own if ``rank_of_stage`` is None."""
    if rank_of_stage is not None:
        return Placement("saved", tuple(rank_of_stage))
    chunks = getattr(args, "virtual_pipeline_model_parallel_size", None) or 1
    return Placement("saved", tuple(range(args.pipeline_model_parallel_size)) * chunks)


@dataclass(frozen=True)
class _Part:
    """Part of the model on one stage: layers, embedding, multi-token prediction, output layer."""

    layers: range
    embedding: bool
    depths: int
    output_layer: bool

    def __str__(self) -> str:
        words = [
            "the embedding" * self.embedding,
            _layers(self.layers),
            counted(self.depths, "depth") + " of multi-token prediction" if self.depths else "",
            "the output layer" * self.output_layer,
        ]
        return " and ".join(word for word in words if word) or "no layer"


def _layers(layers: range) -> str:
    if not layers:
        return ""
    first, last = layers[0] + 1, layers[-1] + 1
    return f"layer {first}" if first == last else f"layers {first} to {last}"


def _held(args: Any, placement: Placement) -> list[tuple[_Part, ...]]:
    """Return, for each pipeline rank, the parts of the model on its stages."""
    counts = layers_of_stages(args, placement)
    last = len(counts) - 1
    depths = [0] * last + [getattr(args, "mtp_num_layers", None) or 0]
    if args.pipeline_model_parallel_layout is not None:
        segments = PipelineParallelLayerLayout.parse_str_to_list(
            args.pipeline_model_parallel_layout
        )
        depths = [segment.count(LayerType.mtp) for segment in segments]
    ends = [*accumulate(counts, initial=0)]
    parts = [
        _Part(range(ends[stage], ends[stage + 1]), stage == 0, depths[stage], stage == last)
        for stage in range(len(counts))
    ]
    return [tuple(parts[stage] for stage in stages) for stages in placement.stages_of]


def _parts(parts: tuple[_Part, ...]) -> str:
    return "; ".join(map(str, parts))


def _check_buffers(saved: SavedTraining, args: Any) -> None:
    """Raise DoesNotLoad if optimizer states were saved in buffers of another layout.

    The layout depends on the parameters' types, the rows of the vocabulary, and the sizes of the
    gradient buckets on the first pipeline rank.
    """
    before = saved.args
    types = [(one.params_dtype, _gradients(one)) for one in (before, args)]
    kind = saved.metadata.get(_KIND)
    texts = [f"{weights} with gradients in {gradients}" for weights, gradients in types]
    rows = [one.padded_vocab_size for one in (before, args)]
    if None not in rows:
        texts = [
            f"{text}, {count} rows of the vocabulary"
            for text, count in zip(texts, rows, strict=True)
        ]
    if texts[0] != texts[1]:
        raise DoesNotLoad(
            f"the checkpoint's optimizer states ({kind}) fit only parameters of {texts[0]}, and "
            f"the command has {texts[1]}",
            _AS_BEFORE,
        )
    buckets = [_bucket(one) for one in (before, args)]
    sizes = _first_buffer(saved)
    if buckets[0] == buckets[1] or not sizes:
        return
    elements = sum(sizes)
    is_split = len(sizes) > 1, buckets[1] is not None and elements > buckets[1]
    reason = (
        f"the checkpoint's optimizer states ({kind}) fit only buckets of gradients of "
        f"{buckets[0] or elements} elements, and the command has buckets of "
        f"{buckets[1] or elements} (--overlap-grad-reduce, --ddp-bucket-size, number of replicas)"
    )
    if is_split[0] != is_split[1]:
        raise DoesNotLoad(reason, _AS_BEFORE)
    if is_split[0]:
        raise ValueError(reason)


def _gradients(args: Any) -> Any:
    return torch.float32 if args.accumulate_allreduce_grads_in_fp32 else args.params_dtype


def _bucket(args: Any) -> int | None:
    """Return the number of elements after which a gradient bucket ends; None if it never ends."""
    if not args.overlap_grad_reduce:
        return None
    replicas = args.data_parallel_size * args.context_parallel_size
    return getattr(args, "ddp_bucket_size", None) or default_bucket(replicas)


def _first_buffer(saved: SavedTraining) -> list[int]:
    """Return the numbers of elements in the buckets of the first rank's first gradient buffer."""
    prefix = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0."
    return [
        shape[0]
        for name, shape in saved.sizes.items()
        if name.removeprefix("chained_0.").startswith(prefix) and name.endswith(".exp_avg")
    ]


def _check_equal_arguments(saved: Any, args: Any) -> None:
    """Raise DoesNotLoad if an argument differs that Megatron's `check_checkpoint_args` compares."""
    names = ["num_layers", "hidden_size", "num_attention_heads"]
    if args.vocab_file:
        names += ["max_position_embeddings", "make_vocab_size_divisible_by", "tokenizer_type"]
    if args.data_parallel_random_init:
        names.append("data_parallel_random_init")
    if getattr(args, "phase_transition_iterations", None):
        names.append("global_batch_size")
    for name in names:
        was, now = getattr(saved, name, None), getattr(args, name)
        if was != now:
            flag = "--" + name.replace("_", "-")
            raise DoesNotLoad(
                f"{flag} {now}: the checkpoint was saved with {was}", f"write {flag} {was}"
            )


def _check_scheduler(saved: SavedTraining, command: Command) -> None:
    args = command.args
    if saved.scheduler is None or command.scheduler is None:
        return
    if args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler:
        return
    for name, words in _SCHEDULER.items():
        was, now = saved.scheduler.get(name), command.scheduler.get(name)
        if name in saved.scheduler and was != now:
            raise DoesNotLoad(
                f"the learning-rate schedules of checkpoint and command differ in {words}: {was} "
                f"in the checkpoint, {now} in the command",
                "add --override-opt-param-scheduler to use the command's schedule, or "
                "--use-checkpoint-opt-param-scheduler to use the checkpoint's",
            )


def _remark(saved: Any, args: Any, found: list[ModelDifference]) -> str:
    remarks = [f"{difference}, and Megatron does not say so" for difference in found]
    was, now = getattr(saved, "padded_vocab_size", None), args.padded_vocab_size
    if was and now and now > was:
        remarks.append(
            f"the vocabulary has {now} rows and the checkpoint {was}: Megatron leaves the others "
            f"as they are drawn, and their logits count in the loss; --padded-vocab-size {was} "
            f"takes those that were trained"
        )
    elif was and now and now < was:
        remarks.append(f"the vocabulary has {now} rows, and Megatron drops the last {was - now}")
    return "; ".join(remarks)
