"""Remark of a feature on a launch, made before the launch runs. Doctor shows it with its checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ext.compile.program.verify import Program


@dataclass(frozen=True)
class JudgedLaunch:
    """Launch, before it runs, on which a feature may remark.

    Attributes:
        config: its `PipelineConfig`.
        program: the program of its largest step.
        contenders: by schedule, the programs of other schedules under which steps may run.
        iterations: number of the last iteration; None: not known.
    """

    config: Any
    program: Program
    contenders: Mapping[str, Sequence[Program]]
    iterations: int | None


@dataclass(frozen=True)
class LaunchRemark:
    """Remark on a launch. ``fix`` is the change that the user should make; empty if all is well."""

    subject: str
    text: str
    fix: str = ""


RemarkOn = Callable[[JudgedLaunch], Iterator[LaunchRemark]]
