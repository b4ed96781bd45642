"""Launch commands of programs that call Megatron themselves.

Their words are settings of their own, and cannot be checked as Megatron's arguments. They are
recognized by their script, by what it imports or by their words, and the user is told how such a
program gets a schedule of ours.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.config import variable
from megatron_ext.launch.command.launch_words import Launch

_PAGE = "docs/other-callers.md"


@dataclass(frozen=True)
class _Program:
    """Program other than Megatron's scripts that calls Megatron.

    Attributes:
        name: name that people use.
        script: regular expression of the program's module, or of its script's path.
        package: regular expression of a package that its scripts import.
        words: regular expression of words that only its commands have.
        remedy: how its trainings get a schedule of ours, and are planned.
    """

    name: str
    script: str
    package: str
    words: str
    remedy: str


_AUTO = (
    f"for a schedule of ours export VERL_USE_EXTERNAL_MODULES=megatron_ext.auto and "
    f"{variable('schedule')}=zb-v ({_PAGE})"
)
_INSTALL = f"for a schedule of ours call megatron_ext.install ({_PAGE})"
_BRIDGE = (
    f"plan and doctor take the function that makes its config in place of the command, as "
    f"MODULE:FUNCTION ({_PAGE})"
)
_PROGRAMS = (
    _Program("verl", r"verl\.|(.*/)?verl/.*", r"verl", r"[+~]*actor_rollout_ref\..*", _AUTO),
    _Program(
        "Megatron-Bridge",
        r"megatron\.bridge\.|(.*/)?run_recipe\.py",
        r"megatron\.bridge",
        r"--(recipe|step_func)(=.*)?",
        _BRIDGE,
    ),
    _Program(
        "slime", r"slime\.", r"slime", r"--(actor-num-(nodes|gpus-per-node)|rollout-.*)", _INSTALL
    ),
    _Program("NeMo-RL", r"nemo_rl\.", r"nemo_rl", r"(?!)", _INSTALL),
    _Program("ms-swift", r"swift\.", r"swift", r"(?!)", _INSTALL),
)
_MEGATRONS_SCRIPT = re.compile(r"(.*[/.])?pretrain_\w+(\.py)?")
_MEGATRONS_TEXT = re.compile(r"\bmegatron[._]training\b|\bmegatron_ext\b|\bimport pretrain\b")
# A command must have one of these arguments, which tell where the model's sizes come from.
_SIZES = frozenset(
    {
        "--num-layers",
        "--encoder-num-layers",
        "--hidden-size",
        "--num-attention-heads",
        "--hybrid-layer-pattern",
        "--hybrid-override-pattern",
        "--use-checkpoint-args",
        "--yaml-cfg",
    }
)


def why_not_megatrons(launch: Launch, script: str | None) -> str | None:
    """Return why ``launch`` is no command that Megatron's arguments describe; None if it is one.

    The text says what to do instead.

    Args:
        script: text of the script; None if it cannot be read.
    """
    if launch.log is not None or launch.recipe is not None:
        return None
    target = f"-m {launch.script}" if launch.is_module else launch.script
    has_sizes = any(word.split("=")[0] in _SIZES for word in launch.arguments)
    for program in _PROGRAMS:
        if _is_of(program, launch.script, launch.arguments, script, has_sizes=has_sizes):
            return (
                f"{target} is a command of {program.name}, whose settings are not Megatron's "
                f"arguments; {program.remedy}"
            )
    is_megatrons = _MEGATRONS_SCRIPT.fullmatch(launch.script) or (
        script is not None and _MEGATRONS_TEXT.search(script)
    )
    if has_sizes or is_megatrons:
        return None
    return (
        f"{target} is not known to train by Megatron's arguments, and the command has none of the "
        f"model's sizes, such as --num-layers; {_PAGE} has other programs that call Megatron"
    )


def _is_of(
    program: _Program, name: str, words: Sequence[str], script: str | None, *, has_sizes: bool
) -> bool:
    """Return whether a command belongs to ``program``, judged by its words or its script.

    The script counts only if Megatron's arguments give no sizes of a model, since a script of
    Megatron's may import the program, too.
    """
    if any(re.fullmatch(program.words, word) for word in words):
        return True
    imports = rf"^\s*(?:from|import)\s+{program.package}\b"
    is_its = re.match(program.script, name) or re.search(imports, script or "", re.MULTILINE)
    return not has_sizes and is_its is not None
