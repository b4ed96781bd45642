"""Words of a launch command for a rank that runs alone, and what such a rank cannot run yet.

A rank alone reads no data and no checkpoint, and saves nothing: the flags for these are replaced by
made-up data and random weights. Features under which a rank depends on results of other ranks are
refused.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ext.adapter.pairs.overlap_setting import FLAG as PAIRS
from megatron_ext.adapter.pairs.overlap_setting import requests_pairs
from megatron_ext.base.words import argument_flag
from megatron_ext.compile.feature_settings import WATCHING
from megatron_ext.config import PipelineConfig, flag, variable
from megatron_ext.launch.script import without
from megatron_ext.written_settings import given_in_environment, words_of

MOCK_DATA = "--mock-data"
BALANCED, BIASED = "--moe-router-force-load-balancing", "--moe-router-force-biased"

_DATA = (
    *("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path"),
    *("--data-args-path", "--per-split-data-args-path", "--split"),
)
_FILES = (
    *("--load", "--pretrained-checkpoint", "--save", "--save-interval", "--async-save"),
    *("--tensorboard-dir", "--wandb-project", "--exit-duration-in-mins"),
)
_LENGTH = ("--rampup-batch-size", "--exit-interval", "--eval-iters")
# Settings that a rehearsed rank drops, since they watch other ranks, search, or write files.
_OURS = ("costs", *WATCHING)
_UNTRIED = "is not tried in a rehearsal"


# Megatron's flags that cannot be rehearsed, each with the name of what it switches on.
_SWITCHES = {
    "use_sharp": "SHARP",
    "use_nccl_ub": "NCCL's user buffers",
    "nccl_ub": "NCCL's user buffers",
    "tp_comm_overlap": "user buffers",
    "enable_cuda_graph": "CUDA graphs",
    "external_cuda_graph": "CUDA graphs",
}


def refuse_untried(args: Any, config: PipelineConfig) -> None:
    """Raise ValueError if a rank with these ``args`` and this ``config`` cannot run alone yet."""
    for refusal in _of_megatron(args):
        raise ValueError(refusal)
    refuse_untried_settings(config)


def refuse_untried_settings(config: PipelineConfig) -> None:
    """Raise ValueError if a setting of ours in ``config`` does not let a rank run alone yet."""
    for refusal in _of_ours(config):
        raise ValueError(refusal)


def _of_megatron(args: Any) -> Iterator[str]:
    if args.pipeline_model_parallel_size < 2:
        yield (
            "--pipeline-model-parallel-size is 1: a rehearsal composes the ranks of a pipeline; "
            "write 2 or more"
        )
    if requests_pairs(args):
        yield (
            f"{PAIRS} is not rehearsed: it hides the all-to-all, which copies locally in a rank "
            f"alone; drop it"
        )
    for name, what in _SWITCHES.items():
        if getattr(args, name, False):
            yield f"{argument_flag(name)} {_UNTRIED} ({what}); drop it"
    graphs = getattr(args, "cuda_graph_impl", None)
    if graphs not in (None, "none"):
        yield f"--cuda-graph-impl {graphs} {_UNTRIED} (CUDA graphs); write none"
    if getattr(args, "num_experts", None) and args.moe_token_dispatcher_type == "flex":
        yield (
            f"--moe-token-dispatcher-type flex {_UNTRIED} (DeepEP and HybridEP write into other "
            f"ranks' memory); write alltoall"
        )


def _of_ours(config: PipelineConfig) -> Iterator[str]:
    if config.options.steps_overlap:
        yield f"{flag('post_validation')} {_UNTRIED}; drop it"
    if config.race is not None:
        yield f"{flag('race')} {_UNTRIED}; name its schedules in --schedules"
    if config.arranges_microbatches:
        yield (
            f"{flag('microbatch_order')} or {flag('deal_microbatches')} {_UNTRIED}, whose data are "
            f"made up; drop it"
        )
    if config.rank_speeds is not None:
        yield f"{flag('rank_speeds')} {_UNTRIED}: all ranks run on one device; drop it"


def refuse_imbalance(words: Sequence[str], imbalance: float | None, *, has_experts: bool) -> None:
    """Raise ValueError if --imbalance does not go with the model or with flags of the command.

    Args:
        words: arguments after the script of the launch command.
        imbalance: value of --imbalance; None if it is not given.
    """
    if imbalance is None:
        return
    name = f"--imbalance {imbalance:g}"
    if not math.isfinite(imbalance):
        raise ValueError(
            f"{name}: the standard deviation of the router's bias must be a finite number; write 1"
        )
    if not has_experts:
        raise ValueError(f"{name}: the model has no experts; drop --imbalance")
    given = {BALANCED, BIASED} & {word.split("=")[0] for word in words}
    if given:
        raise ValueError(
            f"{name}: the launch command already has {' and '.join(sorted(given))}; drop one of "
            "the two"
        )


def refuse_variables(environment: Mapping[str, str]) -> None:
    """Raise ValueError if a variable in ``environment`` sets what a flag of ours would set.

    Each rank of a rehearsal would read it, even under Megatron's own schedule, while the launch
    command is judged by its flags alone.
    """
    for name, value in given_in_environment({}, environment)[0].items():
        raise ValueError(
            f"{variable(name)} is set, and a rehearsal takes settings from flags alone: unset it, "
            f"and write {shlex.join(words_of({name: value}))} behind the script"
        )


def replaced_flags(words: Sequence[str]) -> tuple[str, ...]:
    """Return the flags for data and checkpoints in ``words``, which a rehearsal does without."""
    given = {word.split("=")[0] for word in words}
    return tuple(name for name in (*_DATA, "--load", "--pretrained-checkpoint") if name in given)


def words_alone(
    words: Sequence[str],
    costs: Path | None,
    *,
    balances_experts: bool,
    is_cpu: bool,
    imbalance: float | None = None,
) -> tuple[str, ...]:
    """Return the arguments of a script, changed from ``words`` for a rank that runs alone.

    The rank reads no data and no checkpoint, saves nothing, and evaluates nothing.

    Args:
        costs: file of the costs for which the rank compiles its program; None under Megatron's own
            schedule.
        balances_experts: whether each expert gets equally many tokens.
        is_cpu: whether the rank runs on the CPU. Its data loader then has no workers, which would
            take the cores of its passes.
        imbalance: standard deviation of a random bias for each expert in Megatron's router. If
            given, it applies in place of ``balances_experts``.
    """
    dropped = [*_DATA, *_FILES, *_LENGTH, *map(flag, _OURS)]
    left = without(words, dropped)
    added = ["--eval-iters", "0"]
    if is_cpu:
        added += ["--num-workers", "0"]
    if MOCK_DATA not in left:
        added.append(MOCK_DATA)
    if imbalance is not None:
        added += [BIASED, str(imbalance)]
    elif balances_experts and BALANCED not in left:
        added.append(BALANCED)
    if costs is not None:
        added += [flag("costs"), str(costs)]
    return (*left, *added)
