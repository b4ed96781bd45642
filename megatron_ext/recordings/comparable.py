"""Check that two runs can be compared: the same model, data and course of training.

Numbers of runs with another model, other data or other random draws differ for reasons that say
nothing about a schedule. Such a comparison is refused before it runs; every other difference of the
arguments is listed next to the verdict.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from megatron_ext.base.words import argument_flag
from megatron_ext.written_settings import add_flags

# Megatron's arguments that two comparable runs must share, by subject.
MUST_AGREE: Mapping[str, tuple[str, ...]] = {
    "model": (
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
        "max_position_embeddings",
        "vocab_size",
        "num_experts",
        "moe_router_topk",
        "moe_layer_freq",
        "moe_ffn_hidden_size",
        "mtp_num_layers",
        "hybrid_layer_pattern",
        "hybrid_override_pattern",
        "multi_latent_attention",
        "swiglu",
        "normalization",
        "position_embedding_type",
        "add_bias_linear",
        "untie_embeddings_and_output_weights",
        "attention_dropout",
        "hidden_dropout",
    ),
    "data": (
        "mock_data",
        "data_path",
        "train_data_path",
        "data_args_path",
        "split",
        "tokenizer_type",
        "tokenizer_model",
        "seq_length",
    ),
    "training": (
        "seed",
        "global_batch_size",
        "rampup_batch_size",
        "lr",
        "min_lr",
        "lr_decay_style",
        "lr_warmup_iters",
        "lr_warmup_fraction",
        "optimizer",
        "weight_decay",
        "clip_grad",
        "loss_scale",
    ),
    "precision": ("bf16", "fp16", "fp8"),
}


_DROPOUT = ("hidden_dropout", "attention_dropout")
_SLICES = ("pipeline_slices", "pipeline_slice_lengths")

# Symbols of a hybrid model's layers without "|", which separates stages, as stages may differ.
_PATTERNS = {"hybrid_layer_pattern", "hybrid_override_pattern"}


def refusal(a: Mapping[str, Any], b: Mapping[str, Any], words: str) -> str | None:
    """Return why runs with the arguments ``a`` and ``b`` cannot be compared; None if they can.

    Args:
        words: words for the two runs, with which the reason begins.
    """
    return _other_trainings(a, b, words) or _other_draws(a, b, words)


def _other_draws(a: Mapping[str, Any], b: Mapping[str, Any], words: str) -> str | None:
    """Return why dropout of two runs would draw different numbers; None if it would not.

    With slices, a stage draws its random numbers slice by slice, in another order than without.
    """
    cuts = [_cut_as(arguments) for arguments in (a, b)]
    draws = any(arguments.get(name) for name in _DROPOUT for arguments in (a, b))
    if cuts[0] == cuts[1] or not draws:
        return None
    return (
        f"{words} cannot be compared: with {cuts[0]} and {cuts[1]} dropout draws other numbers; "
        "give both commands --hidden-dropout 0 --attention-dropout 0"
    )


def _cut_as(arguments: Mapping[str, Any]) -> str:
    if str(arguments.get("pipeline_slices") or 1) == "1":
        return "whole sequences"
    given = {argument_flag(name): arguments.get(name) for name in _SLICES}
    return " ".join(f"{name} {value}" for name, value in given.items() if value)


def _other_trainings(a: Mapping[str, Any], b: Mapping[str, Any], words: str) -> str | None:
    differing = {
        kind: [name for name in names if _without_ends(name, a) != _without_ends(name, b)]
        for kind, names in MUST_AGREE.items()
    }
    kinds = [kind for kind, names in differing.items() if names]
    if not kinds:
        return None
    differences = [
        f"{argument_flag(name)} ({a.get(name)!r} and {b.get(name)!r})"
        for names in differing.values()
        for name in names
    ]
    return (
        f"{words} cannot be compared, they differ in their {' and '.join(kinds)}: "
        f"{', '.join(differences)}; give both commands the same values"
    )


def _without_ends(name: str, arguments: Mapping[str, Any]) -> Any:
    value = arguments.get(name)
    return value.replace("|", "") if name in _PATTERNS and isinstance(value, str) else value


def argument_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the arguments that differ between two comparable runs, by their flags.

    Arguments that have to agree, and those that differ by chance, are not among them.
    """
    must = {name for names in MUST_AGREE.values() for name in names} - _PATTERNS
    a, b = {**_OURS, **a}, {**_OURS, **b}
    return {
        argument_flag(name): (a.get(name), b.get(name))
        for name in sorted(a.keys() | b.keys())
        if name not in must | _INCIDENTAL and a.get(name) != b.get(name)
    }


# Defaults of megatron_ext's flags, which stand for the flags in runs that have none.
_OURS = vars(add_flags(argparse.ArgumentParser(add_help=False)).parse_args([]))


# Settings of megatron_ext that by design add the terms of some sum in another order.
_ORDER_OF_SUMS = (
    *_SLICES,
    "pipeline_vocab_parallel",
    "pipeline_microbatch_order",
    "pipeline_deal_microbatches",
    "pipeline_microbatch_weights",
)


def adds_in_another_order(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Return whether two runs differ by design in the order of their sums, and a third can show it.

    The third is a run with the microbatches of each step reversed. Such a run shows nothing with
    dropout, whose random numbers are drawn in the order of the microbatches.

    Args:
        a, b: Megatron's arguments of the two runs.
    """
    a, b = {**_OURS, **a}, {**_OURS, **b}
    draws = any(arguments.get(name) for name in _DROPOUT for arguments in (a, b))
    return not draws and any(str(a.get(name)) != str(b.get(name)) for name in _ORDER_OF_SUMS)


# Arguments that may differ between comparable runs: they differ between two runs of one command, or
# follow from other arguments.
_INCIDENTAL = {
    "load",
    "save",
    "rank",
    "local_rank",
    "exit_interval",
    "tensorboard_dir",
    "consumed_train_samples",
    "iteration",
}
