"""Check that the flags of a launch command are known, and that ours take effect."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace

from megatron_ext.config import PipelineConfig, variable
from megatron_ext.doctor.report import Finding, Severity
from megatron_ext.launch_command.unknown_words import unknown_words
from megatron_ext.launch_command.words import Launch
from megatron_ext.launch_planner.command_line import IMPORTS_US
from megatron_ext.written_settings import (
    from_argv,
    from_environment,
    given_beside,
    given_in,
    settings_given,
    words_of,
)

_AUTO = "megatron_ext.auto"


def with_variables(launch: Launch, script: str | None) -> tuple[Launch, list[Finding]]:
    """Return ``launch`` with flags in place of the variables that ``-m megatron_ext`` reads, and
    remarks on them.

    Raises:
        ValueError: a variable is not understood.
    """
    schedule = variable("schedule")
    if _is_automatic(launch, script):
        return launch, []
    if launch.installs is False:
        if not os.environ.get(schedule):
            return launch, []
        text = f"nothing in the command reads {schedule}: this is Megatron's own pipeline"
        return launch, [Finding(Severity.REMARK, "flags", text, "write -m megatron_ext before it")]
    added, overruled = given_beside(given_in(launch.arguments), os.environ)
    words = words_of(added)
    findings = [Finding(Severity.REMARK, "flags", text) for text in overruled]
    if words:
        text = f"from variables: {shlex.join(words)}"
        findings.append(Finding(Severity.RIGHT, "flags", text))
    return replace(launch, arguments=(*launch.arguments, *words)), findings


def settings_of(launch: Launch, script: str | None) -> PipelineConfig:
    """Return the settings of ``launch``: of its flags, or of variables if `megatron_ext.auto` reads
    them.

    Raises:
        ValueError: a setting is not understood.
    """
    if settings_given(launch.arguments) or not _is_automatic(launch, script):
        return from_argv(launch.arguments)
    return from_environment(os.environ)


def _is_automatic(launch: Launch, script: str | None) -> bool:
    return _AUTO in launch.environment.values() or _AUTO in (script or "")


def check_installation(launch: Launch, script: str | None) -> list[Finding]:
    """Check that our flags take effect: the command has ``-m megatron_ext``, or its script imports
    megatron_ext.

    Args:
        script: text of the script; None if it cannot be read.
    """
    if not settings_given(launch.arguments) or launch.installs:
        return []
    target = f"-m {launch.script}" if launch.is_module else launch.script
    fix = f"write -m megatron_ext {target} in place of {target}"
    ours = f"our flags need -m megatron_ext before {target}"
    if script is not None and IMPORTS_US.search(script):
        return [Finding(Severity.RIGHT, "script", f"{target} imports megatron_ext itself")]
    if _AUTO in launch.environment.values():
        return [Finding(Severity.RIGHT, "script", f"the environment names {_AUTO}")]
    if launch.installs is None:
        text = f"{ours}: the command begins behind the place where it would stand"
        return [Finding(Severity.REMARK, "script", text, f"launch it as -m megatron_ext {target}")]
    if script is None:
        text = f"{ours}, or a script that imports megatron_ext; {target} cannot be read here"
        return [Finding(Severity.REMARK, "script", text, f"{fix}, unless it imports megatron_ext")]
    text = f"{ours}, and the command lacks it: Megatron would end with 'unrecognized arguments'"
    return [Finding(Severity.WRONG, "script", text, fix)]


def check_words(
    argv: Sequence[str], unknown: Sequence[str], flags: Sequence[str], script: str | None
) -> list[Finding]:
    """Return a finding for each of the ``unknown`` words of ``argv``, as `unknown_words` has it."""
    findings = [
        Finding(Severity(word.verdict), "flags", word.text, word.fix)
        for word in unknown_words(argv, unknown, flags, script)
    ]
    if not any(finding.verdict is Severity.WRONG for finding in findings):
        text = "all others are Megatron's or ours" if findings else "all are Megatron's or ours"
        findings.append(Finding(Severity.RIGHT, "flags", text))
    return findings
