"""Effect of our flags in a launch command, and of the variables that replace them.

Flags can be in a command and still do nothing: only ``-m megatron_ext``, or a script that imports
us, reads them. They can also be replaced by variables, or be a script's own flags of the same name.
Plan and doctor must judge what the ranks will do, and say which of these it is.
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import replace

from megatron_ext.config import PipelineConfig, variable
from megatron_ext.launch.command.launch_words import Launch
from megatron_ext.launch.command.unknown_words import WordFinding
from megatron_ext.launch.script import without
from megatron_ext.written_settings import (
    flag_taken,
    from_argv,
    from_environment,
    given_in,
    given_in_environment,
    our_flags,
    settings_given,
    words_of,
)

IMPORTS_US = re.compile(r"^\s*(?:import|from)\s+megatron_ext\b", re.MULTILINE)
_ADDS = re.compile(r"""add_argument\(\s*["'](--pipeline-[\w-]+)["']""")
_AUTO = "megatron_ext.auto"


def flags_of_script(script: str | None) -> list[str]:
    """Return the flags with names of ours that the text of a ``script`` adds to its own parser."""
    return [name for name in _ADDS.findall(script or "") if name in our_flags()]


def without_flags_of_script(launch: Launch, script: str | None) -> tuple[Launch, list[WordFinding]]:
    """Return ``launch`` without flags of its own ``script`` that have the names of ours.

    The findings tell which these are. With megatron_ext in the command, such flags are in conflict
    with ours.
    """
    adds = flags_of_script(script)
    imports_us = script is not None and IMPORTS_US.search(script)
    if adds and (launch.installs or imports_us):
        return launch, [WordFinding("wrong", flag_taken(adds[0]))]
    findings = [WordFinding("right", f"{name} is the script's own") for name in adds]
    return replace(launch, arguments=tuple(without(launch.arguments, adds))), findings


def installation(launch: Launch, script: str | None) -> WordFinding | None:
    """Return a finding on whether our flags take effect; None if the command needs no finding.

    They take effect with ``-m megatron_ext`` in the command, or if its script imports megatron_ext.

    Args:
        script: text of the script; None if it cannot be read.
    """
    if not settings_given(launch.arguments) or launch.installs:
        return None
    target = f"-m {launch.script}" if launch.is_module else launch.script
    fix = f"write -m megatron_ext {target} in place of {target}"
    ours = f"our flags need -m megatron_ext before {target}"
    if script is not None and IMPORTS_US.search(script):
        return WordFinding("right", f"{target} imports megatron_ext itself")
    if _AUTO in launch.environment.values():
        return WordFinding("right", f"the environment names {_AUTO}")
    if launch.installs is None:
        text = f"{ours}: the command begins behind the place where it would stand"
        return WordFinding("remark", text, f"launch it as -m megatron_ext {target}")
    if script is None:
        text = f"{ours}, or a script that imports megatron_ext; {target} cannot be read here"
        return WordFinding("remark", text, f"{fix}, unless it imports megatron_ext")
    text = f"{ours}, and the command lacks it: Megatron would end with 'unrecognized arguments'"
    return WordFinding("wrong", text, fix)


def with_variables(launch: Launch, script: str | None) -> tuple[Launch, list[WordFinding]]:
    """Return ``launch`` with flags for variables that ``-m megatron_ext`` reads, and remarks.

    A launch that is read from a log has its variables as flags already, and a recipe reads no
    variables.

    Raises:
        ValueError: a variable is not understood.
    """
    schedule = variable("schedule")
    is_command = launch.log is None and launch.recipe is None
    if not is_command or _is_automatic(launch, script):
        return launch, []
    if launch.installs is False:
        if not os.environ.get(schedule):
            return launch, []
        text = f"nothing in the command reads {schedule}: this is Megatron's own pipeline"
        return launch, [WordFinding("remark", text, "write -m megatron_ext before it")]
    added, overruled = given_in_environment(given_in(launch.arguments), os.environ)
    words = words_of(added)
    findings = [WordFinding("remark", text) for text in overruled]
    if words:
        findings.append(WordFinding("right", f"from variables: {shlex.join(words)}"))
    return replace(launch, arguments=(*launch.arguments, *words)), findings


def settings_of(launch: Launch, script: str | None) -> PipelineConfig:
    """Return our settings in ``launch``.

    They come from its flags, or from variables if `megatron_ext.auto` reads them.

    Raises:
        ValueError: a setting is not understood.
    """
    if settings_given(launch.arguments) or not _is_automatic(launch, script):
        return from_argv(launch.arguments)
    return from_environment(os.environ)


def _is_automatic(launch: Launch, script: str | None) -> bool:
    return _AUTO in launch.environment.values() or _AUTO in (script or "")
