"""Remark of a feature on a launch, made before the launch runs. Doctor shows it with its checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ext.compile.program.verify import Program


@dataclass(frozen=True)
class JudgedLaunch:
    """Launch on which a feature may remark.

    Attributes:
        config: its `PipelineConfig`.
        program: that of its largest step.
        contenders: by schedule, the programs of other schedules under which steps may run.
        iterations: the last one; None: not known.
    """

    config: Any
    program: Program
    contenders: Mapping[str, Sequence[Program]]
    iterations: int | None


@dataclass(frozen=True)
class LaunchRemark:
    """Text on a subject. ``fix``: what the user should change; empty if all is well."""

    subject: str
    text: str
    fix: str = ""


RemarkOn = Callable[[JudgedLaunch], Iterator[LaunchRemark]]
