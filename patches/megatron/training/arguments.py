"""Our flags in Megatron's command line, and checks of them before any process group exists.

Megatron refuses flags that its parser does not know, so ours are added to the parser. A setting
that conflicts with a schedule must end the launch early, so our checks run right after Megatron's
validation of its arguments.

Not patched: parse_args and the argument dataclasses; our settings stay strings in ``args`` (and so
in checkpoints, where Megatron ignores them).
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from megatron_ext.adapter.arguments import (
    check_files,
    complete_arguments,
    prove_without_search,
    remarks_on,
    settle_vocabulary,
)
from megatron_ext.adapter.launch_checks import check_batches, check_schedule, validated
from megatron_ext.base.errors import exit_for
from megatron_ext.base.logger import logger
from megatron_ext.base.words import meant_by
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap
from megatron_ext.written_settings import add_flags


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patches that add the --pipeline-* flags to Megatron's parser and check them."""

    def add_our_flags(
        original: Callable[..., argparse.ArgumentParser], parser: argparse.ArgumentParser
    ) -> argparse.ArgumentParser:
        try:
            return _suggesting(add_flags(_printable(original(parser))))
        except ValueError as error:
            exit_for(error)

    def validate(original: Callable[..., Any], args: Any, defaults: dict[str, Any]) -> Any:
        try:
            args = validated(args, config, lambda args: original(args, defaults), tells=True)
            for change in complete_arguments(args, config):
                if args.rank == 0:
                    logger.info(change)
            # Megatron pads the vocabulary only after it has built the tokenizer.
            padded = copy.copy(args)
            check_batches(padded, config, lambda: settle_vocabulary(padded, config))
            # Every rank checks the schedule here without a search; in the first step one rank
            # searches for all.
            check_schedule(padded, config, prove_without_search)
            for remark in remarks_on(args, config) if args.rank == 0 else ():
                logger.warning(remark.text)
            check_files(args, config)
        except ValueError as error:
            exit_for(error)
        return args

    return (
        wrap(
            "megatron.training.arguments:add_megatron_arguments",
            add_our_flags,
            reason="Megatron's parser gets the --pipeline-* flags of megatron_ext",
            signature="(parser)",
        ),
        wrap(
            "megatron.training.arguments:validate_args",
            lambda original, args, defaults={}: validate(original, args, defaults),
            reason="unsupported settings are refused when Megatron validates its arguments",
            signature="(args, defaults={})",
        ),
    )


def parsing(edited: Callable[[Sequence[str]], list[str]]) -> tuple[Patch, ...]:
    """Return the patch by which Megatron's parser reads ``edited`` arguments of the script.

    The script's ``sys.argv`` stays unchanged.
    """

    def read_edited(
        original: Callable[..., argparse.ArgumentParser], parser: argparse.ArgumentParser
    ) -> argparse.ArgumentParser:
        parser = original(parser)
        read = parser.parse_known_args

        def parse_known_args(args: Sequence[str] | None = None, namespace: Any = None) -> Any:
            return read(edited(sys.argv[1:]) if args is None else args, namespace)

        parser.parse_known_args = parse_known_args  # type: ignore[method-assign, assignment]
        return parser

    return (
        wrap(
            "megatron.training.arguments:add_megatron_arguments",
            read_edited,
            reason="Megatron's parser gets the flags that environment variables or a plan add",
            signature="(parser)",
        ),
    )


def _suggesting(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Make the error of ``parser`` for an unknown flag suggest the flags that resemble it."""
    refuse = parser.error

    def refuse_with_suggestions(message: str) -> NoReturn:
        _, _, unknown = message.partition("unrecognized arguments: ")
        for word in unknown.split():
            name = word.split("=")[0]
            if name.startswith("--") and (meant := meant_by(name, parser._option_string_actions)):
                message += f"; {name}: did you mean {' or '.join(meant)}?"
        refuse(message)

    parser.error = refuse_with_suggestions  # type: ignore[method-assign]
    return parser


def _printable(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Make ``parser`` escape bare per cent signs in help texts before it prints its help.

    Megatron 0.19's own --help fails on them.
    """
    format_help = parser.format_help

    def format_escaped() -> str:
        formatter = parser._get_formatter()
        for action in parser._actions:
            if action.help:
                try:
                    formatter._expand_help(action)
                except ValueError:
                    action.help = action.help.replace("%", "%%")
        return format_help()

    parser.format_help = format_escaped  # type: ignore[method-assign]
    return parser
