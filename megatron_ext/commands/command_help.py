"""Classes of typer's commands whose help is also behind ``-h``, and shows no type of switches."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

HELP = {"help_option_names": ["-h", "--help"]}  # settings for the context of a typer command


class CliCommand(TyperCommand):
    """Command of ``megatron-ext``, whose help shows no type for switches."""

    def get_params(self, ctx: Any) -> Any:
        """Return the options and arguments, as the help lists them."""
        return _without_types_of_switches(super().get_params(ctx))


class CliGroup(TyperGroup):
    """Group of commands of ``megatron-ext``, whose help shows no type for switches."""

    def get_params(self, ctx: Any) -> Any:
        """Return the options, as the help lists them."""
        return _without_types_of_switches(super().get_params(ctx))


def _without_types_of_switches(params: Any) -> Any:
    """Return ``params`` with no type for options that take no value.

    Some versions of typer print ``<bool>`` behind such an option.
    """
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params
