"""The inverse of Megatron's parser: the flags of a training whose arguments it has printed.

Megatron prints what its validation has made of the flags. These flags, validated again, give the
same arguments; a value that they do not give is reported.
"""

from __future__ import annotations

import argparse
import ast
import copy
import enum
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ext.adapter.layout_arguments import CHUNKS, CHUNKS_IN_CONFIGS
from megatron_ext.base.words import argument_flag, shown
from megatron_ext.compile.registry import choose
from megatron_ext.config import PREFIX
from megatron_ext.launch.command import megatron_arguments
from megatron_ext.written_settings import from_argv

# Pairs of arguments that may not both be written: Megatron's validation sets the first to the value
# of the second, and refuses some pairs.
_SAME_AS = {
    "encoder_num_layers": "num_layers",
    "encoder_seq_length": "seq_length",
    "eval_global_batch_size": "global_batch_size",
    "eval_micro_batch_size": "micro_batch_size",
    "expert_tensor_parallel_size": "tensor_model_parallel_size",
    "expert_tensor_parallel_num_weight_shards": "expert_tensor_parallel_size",
    "moe_ffn_hidden_size": "ffn_hidden_size",
    "tensor_parallel_num_weight_shards": "tensor_model_parallel_size",
}
_WEIGHT_DECAYS = ("start_weight_decay", "end_weight_decay")
# Arguments that Megatron's validation switches off if there are no virtual stages; a schedule that
# brings virtual stages keeps them on.
_OF_VIRTUAL_STAGES = ("overlap_p2p_comm", "align_param_gather")
# Arguments that name a file whose contents are in the printed block already.
_HAVE_BEEN_READ = ("use_checkpoint_args", "yaml_cfg")
_NOT_COMPARED = {"rank", "_is_global_batch_size_explicitly_specified", *_HAVE_BEEN_READ}

_DTYPES = {
    "torch.float32": "fp32",
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.uint8": "fp8",
}
_ENUM = re.compile(r"[A-Z]\w+\.\w+")
_ENUM_IN_LIST = re.compile(r"<\w+\.(\w+): [^>]*>")
_NUMBER = re.compile(r"-[\d.]+(e[-+]?\d+)?")
_NONE = "None"


@dataclass(frozen=True)
class Unparsed:
    """Flags that give the arguments which a training's log has printed.

    Attributes:
        words: words of the command line, after the script.
        unknown: printed names that the Megatron here does not have.
        differences: a text for each argument to which the flags give another value here.
    """

    words: tuple[str, ...]
    unknown: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()


def unparse(printed: Mapping[str, str]) -> Unparsed:
    """Return the flags that give the arguments ``printed`` in a log after their validation.

    Raises:
        ValueError: Megatron's parser does not take a value, or a list is not understood.
    """
    words = unparsed_flags(printed)
    args = megatron_arguments.parse_arguments(words).args
    try:
        validated = vars(_validated(args, words, int(printed["world_size"])))
    except ValueError:  # the caller validates the flags again, and reports the error
        return Unparsed(words)
    renamed = _renamed(megatron_arguments.parser(), printed)
    names = {name: renamed.get(name, name) for name in printed}
    differences = tuple(
        f"{name} is {shown(text)} in the log and {shown(validated[names[name]])} by its flags here"
        for name, text in printed.items()
        if names[name] in validated
        and str(validated[names[name]]) != text
        and name not in _NOT_COMPARED
    )
    unknown = tuple(name for name in printed if names[name] not in validated)
    return Unparsed(words, unknown, differences)


def _renamed(parser: argparse.ArgumentParser, printed: Mapping[str, str]) -> dict[str, str]:
    """Return today's names of arguments that another version of Megatron has ``printed``.

    That version printed an argument under the name of its flag, which still exists:
    ``norm_epsilon`` for ``--norm-epsilon``.
    """
    names = {action.dest for action in parser._actions}
    flags = {word: action.dest for action in parser._actions for word in action.option_strings}
    return {
        name: today
        for name in printed.keys() - names
        if (today := flags.get(argument_flag(name))) is not None and today not in printed
    }


def unparsed_flags(printed: Mapping[str, str]) -> tuple[str, ...]:
    """Return the flags of the arguments ``printed``, without checking what they give here.

    Raises:
        ValueError: a list is not understood.
    """
    parser = megatron_arguments.parser()
    given = {name: text for name, text in printed.items() if not _is_derived(name, printed)}
    if printed.get("use_layer_wise_distributed_optimizer") == str(True):
        # Megatron's validation has replaced this argument by the other argument of the pair.
        given["use_distributed_optimizer"] = str(True)
    renamed = _renamed(parser, printed)
    return tuple(
        word for name in given for word in _words(parser, renamed.get(name, name), given[name])
    )


def _validated(args: Any, words: tuple[str, ...], world_size: int) -> Any:
    args = copy.deepcopy(args)
    with megatron_arguments.on_gpus(args):
        return megatron_arguments.validate(args, from_argv(words), world_size)


def _is_derived(name: str, printed: Mapping[str, str]) -> bool:
    """Return whether Megatron derives the printed value of ``name`` from other arguments."""
    if name in _SAME_AS:
        return printed[name] == printed.get(_SAME_AS[name])
    if name in _WEIGHT_DECAYS:
        return printed.get("weight_decay_incr_style") == "constant"
    if name in _OF_VIRTUAL_STAGES:
        return printed.get(CHUNKS_IN_CONFIGS) == _NONE
    if name == "global_batch_size":
        return printed.get("step_batch_size_schedule", _NONE) != _NONE
    if name == CHUNKS:
        return _brings_stages(printed)
    return name in _HAVE_BEEN_READ


def _brings_stages(printed: Mapping[str, str]) -> bool:
    """Return whether the log names a schedule of ours, and prints as many virtual stages as that
    schedule has."""
    spec = printed.get(f"{PREFIX}schedule", _NONE)
    if spec == _NONE:
        return False
    ranks = int(printed.get("pipeline_model_parallel_size", 1))
    chunks = choose(spec).place(ranks).chunks
    return printed[CHUNKS] == str(chunks)


def _words(parser: argparse.ArgumentParser, name: str, text: str) -> Iterator[str]:
    """Yield the flag that gives the argument ``name`` the value printed as ``text``.

    Nothing is yielded for a default value.
    """
    actions = [action for action in parser._actions if action.dest == name]
    if not actions or text == str(parser.get_default(name)) or text == _NONE:
        return
    for action in actions:
        flag = action.option_strings[0]
        if isinstance(action, argparse.BooleanOptionalAction):
            negative = next(word for word in action.option_strings if word.startswith("--no-"))
            yield flag if text == str(True) else negative
        elif action.nargs == 0:
            if text == str(action.const):
                yield flag
        else:
            values = _values(action, text)
            if values == [str(action.default)]:
                return
            if len(values) == 1 and values[0].startswith("-"):
                yield f"{flag}={values[0]}"
            else:
                yield from (flag, *values)


def _values(action: argparse.Action, text: str) -> list[str]:
    """Return the words of a flag's value that is printed as ``text``."""
    for allowed in action.choices or ():
        if isinstance(allowed, enum.Enum) and text == str(allowed):
            return [allowed.name]
        # The text after the dot is returned, from which the parser makes the value of the
        # enumeration.
        if _ENUM.fullmatch(text) and text.endswith(f".{allowed}"):
            return [allowed]
    if text.startswith("[") and action.nargs is not None:
        return _items(action.dest, text)
    if action.dest.startswith(PREFIX):
        return [text]
    if text.startswith("["):  # an expression such as ([0]*3+[1]*5) is one word without spaces
        return [text.replace(" ", "")]
    return [_DTYPES.get(text, text)]


def _items(name: str, text: str) -> list[str]:
    try:
        items = [str(value) for value in ast.literal_eval(_ENUM_IN_LIST.sub(r"'\1'", text))]
    except (MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
        items = ["--"]
    if any(item.startswith("-") and not _NUMBER.fullmatch(item) for item in items):
        # An item that begins with a dash would be taken for a flag if it were written into the
        # command.
        raise ValueError(f"{name} {shown(text)} cannot be read as a list")
    return items
