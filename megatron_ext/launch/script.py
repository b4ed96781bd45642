"""Launch of an unmodified training script, with the patches that its command line requests.

There is one process per rank, started by torchrun or srun; patches are applied before the script's
first import.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_ext.base.errors import exit_for, without_torch
from megatron_ext.base.logger import logger, telling_of_long_work
from megatron_ext.compile.program.verify import InvalidSchedule
from megatron_ext.config import PipelineConfig
from megatron_ext.launch.installation import install
from megatron_ext.patches.engine import PatchError, apply
from megatron_ext.written_settings import (
    MEGATRONS_OFFLOAD,
    Given,
    flag_taken,
    for_megatrons_offload,
    given_in,
    given_in_environment,
    our_flags,
    words_of,
)

CPU_PLATFORM = "megatron_ext.patches.cpu"


def is_launch(argv: Sequence[str]) -> bool:
    """Return whether ``argv`` starts with a script (``x.py``) or ``-m module``."""
    return bool(argv) and (argv[0] == "-m" or argv[0].endswith(".py"))


def refuse_flags_before_script(argv: Sequence[str]) -> None:
    """Raise ValueError if flags stand between ``-m megatron_ext`` and the script in ``argv``.

    Flags belong behind the script: those before it are not read.
    """
    scripts = (i for i, word in enumerate(argv) if word == "-m" or word.endswith(".py"))
    index = next(scripts, 0)
    if index and argv[0].startswith("-"):
        flags, script = shlex.join(argv[:index]), shlex.join(argv[index : index + 1])
        script += f" {argv[index + 1]}" if script == "-m" and argv[index + 1 :] else ""
        raise ValueError(
            f"{argv[0]} stands before the script, where flags are not read: write it behind the "
            f"script, -m megatron_ext {script} {flags} ..."
        )


@dataclass(frozen=True)
class Chosen:
    """Flags chosen to replace ``--pipeline-schedule plan`` (or an ``auto``) in a launch command.

    Attributes:
        flags: flags to add.
        why: the reason for the choice, in one line.
        dropped: flags to remove, each with its value.
    """

    flags: tuple[str, ...]
    why: str
    dropped: tuple[str, ...] = ()

    def in_place_of(self, words: Sequence[str]) -> list[str]:
        """Return the arguments ``words`` with these flags, each once."""
        return [*without(words, self.replaced), *self.flags]

    @property
    def replaced(self) -> tuple[str, ...]:
        """Flags of a launch command that the chosen flags replace, so that their values do not
        count."""
        return (*self.dropped, *(word for word in self.flags if word.startswith("--")))


# Type of a function that gets the words after the script, the settings and the world size.
ChoosePlan = Callable[[Sequence[str], PipelineConfig, int], Chosen]
# Type of a function that applies the patches of a rehearsed rank and returns the words to add to
# the command.
PrepareRehearsal = Callable[[PipelineConfig], Sequence[str]]


@dataclass(frozen=True)
class RecordingRequest:
    """Request to record the results of ``iterations`` iterations of a training into ``folder``.

    ``is_reversed``: whether each step runs its microbatches in reverse order.
    """

    folder: Path
    iterations: int
    is_reversed: bool = False


def launch(
    argv: Sequence[str],
    choose: ChoosePlan,
    recorded: RecordingRequest | None = None,
    prepare_rehearsal: PrepareRehearsal | None = None,
) -> None:
    """Run the script or module that ``argv`` starts with, as ``__main__``, with its arguments.

    Patches are applied if the arguments contain one of our flags or ``--help``, or if a variable
    ``MEGATRON_EXT_X`` replaces a flag; otherwise Megatron stays unchanged. Without a GPU the CPU
    platform is applied.

    ``choose`` is called if the schedule is ``plan``, or an ``auto`` with open options. With
    ``recorded`` the training is recorded and ends early; its results do not change, but for
    reversed microbatches. With ``prepare_rehearsal`` this process is one rank of many, and trains
    without the other ranks.

    Exits with status 2 and one line for a mistake in our flags, a patch that does not fit, or a
    missing script.
    """
    as_module = argv[0] == "-m"
    if as_module and len(argv) < 2:
        exit_for(ValueError("-m needs the name of a module"))
    script, *arguments = argv[1:] if as_module else argv
    if not as_module and not Path(script).is_file():
        exit_for(ValueError(f"there is no script {script}"))
    sys.argv = [script, *arguments]
    try:
        os.environ.update(slurm_ranks(os.environ))
        given = given_in(arguments)
        added = _from_environment(given)
        added |= _for_megatrons_offload(arguments, given | added)
        config = PipelineConfig.parse(**given, **added)
        words, dropped = words_of(added), tuple[str, ...]()
        if not _has_gpu():
            words += _use_cpu([*arguments, *words])
        if config.is_chosen_later:
            chosen = _planned([*arguments, *words], config, choose)
            words, dropped = chosen.in_place_of(words), chosen.replaced
            config = PipelineConfig.parse(**(given | added | given_in(chosen.flags)))
        if recorded is not None:
            # The patches that record a run are applied first, so that actions which other patches
            # defer are recorded when they run.
            _record(recorded)
        if prepare_rehearsal is not None:
            words = [*words, *prepare_rehearsal(config)]
        if given or added or {"-h", "--help"} & set(arguments):
            install(config)
        if words or dropped:
            _have_parsed(words, dropped)
    except (ValueError, PatchError) as error:
        exit_for(error)
    _run(script, as_module=as_module)


def _run(script: str, *, as_module: bool) -> None:
    try:
        if as_module:
            sys.path[0] = os.getcwd()
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(script).resolve().parent)
            runpy.run_path(script, run_name="__main__")
    except InvalidSchedule as error:  # a search in the first step has found no valid schedule
        exit_for(error)
    except argparse.ArgumentError as error:  # the script adds its flags after ours
        name = next((flag for flag in our_flags() if str(error).endswith(f": {flag}")), None)
        if name is None:
            raise
        exit_for(ValueError(flag_taken(name)))


def _record(recorded: RecordingRequest) -> None:
    from megatron_ext.adapter.parity.result_recorder import ParityRecorder
    from megatron_ext.patches.megatron.training.training import recording

    recorder = ParityRecorder(recorded.folder, recorded.iterations)
    reversing = recording.reversing_patches() if recorded.is_reversed else ()
    apply((*recording.patches(recorder), *reversing))


def _have_parsed(words: Sequence[str], dropped: Sequence[str]) -> None:
    """Make Megatron's parser read ``words`` in addition to the script's arguments.

    The flags ``dropped`` are not read. Checkpoints contain the arguments that Megatron parses.
    """
    from megatron_ext.patches.megatron.training.arguments import parsing

    apply(parsing(lambda argv: [*without(argv, dropped), *words]))


def _from_environment(given: Given) -> dict[str, str | bool]:
    """Return our settings from variables ``MEGATRON_EXT_*`` that no flag has ``given``."""
    added, overruled = given_in_environment(given, os.environ)
    if os.environ.get("RANK", "0") == "0":
        for line in overruled:
            logger.warning(line)
        if added:
            logger.info(f"from the environment: {shlex.join(words_of(added))}")
    return added


def _for_megatrons_offload(arguments: Sequence[str], given: Given) -> dict[str, str | bool]:
    added = for_megatrons_offload(arguments, given)
    if added and os.environ.get("RANK", "0") == "0":
        logger.info(f"for {MEGATRONS_OFFLOAD}: {' '.join(words_of(added))}")
    return added


def _planned(words: Sequence[str], config: PipelineConfig, choose: ChoosePlan) -> Chosen:
    """Return the plan under which the launch with ``words`` after its script will train."""
    rank = int(os.environ.get("RANK", "0"))
    with telling_of_long_work(rank):
        chosen = choose(words, config, int(os.environ.get("WORLD_SIZE", "1")))
    if rank == 0:
        replaced = f" in place of {' '.join(chosen.dropped)}" if chosen.dropped else ""
        logger.info(f"{config.schedule} takes {shlex.join(chosen.flags)}{replaced}: {chosen.why}")
    return chosen


def without(argv: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Return the words ``argv`` without ``flags`` and their values."""
    return [argv[place] for place in left_without(argv, flags)]


def left_without(argv: Sequence[str], flags: Sequence[str]) -> list[int]:
    """Return the indices of the words in ``argv`` that are not ``flags`` or their values."""
    left: list[int] = []
    is_gone = False
    for place, word in enumerate(argv):
        if word.startswith("--"):
            is_gone = word.split("=")[0] in flags
        if not is_gone:
            left.append(place)
    return left


def slurm_ranks(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torch.distributed requires, derived from ``srun``'s.

    A batch script that was not given a number of tasks runs one process.

    Returns:
        RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT as far as
        ``env`` lacks them; empty if torchrun has set them, or outside a SLURM step.

    Raises:
        ValueError: a variable of SLURM is missing, or not understood.
    """
    if "RANK" in env or "SLURM_PROCID" not in env:
        return {}
    if env["SLURM_PROCID"] == "0" and "SLURM_NTASKS" not in env:
        env = {**env, **_ONE_PROCESS}
    wanted: dict[str, Callable[[], str]] = {
        "RANK": partial(_of_slurm, env, "SLURM_PROCID"),
        "WORLD_SIZE": partial(_of_slurm, env, "SLURM_NTASKS"),
        "LOCAL_RANK": partial(_of_slurm, env, "SLURM_LOCALID"),
        "LOCAL_WORLD_SIZE": partial(_tasks_on_first_node, env),
        "MASTER_ADDR": partial(_first_host_of, env),
        # Each SLURM job gets a port of its own, so that jobs on one node do not meet.
        "MASTER_PORT": lambda: str(20000 + int(_of_slurm(env, "SLURM_JOB_ID", "0")) % 20000),
    }
    return {name: find() for name, find in wanted.items() if name not in env}


_ONE_PROCESS = {
    "SLURM_NTASKS": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_STEP_NODELIST": "localhost",
}


def _of_slurm(env: Mapping[str, str], name: str, default: str = "") -> str:
    """Return the number in SLURM's variable ``name``, as text."""
    value = env.get(name, default)
    if not value.isdecimal():
        found = "is not set, and SLURM_PROCID is"
        if name in env:
            found = f"is {value!r}, which is no number"
        raise ValueError(
            f"{name} {found}: srun sets all variables of SLURM for each rank; launch the ranks "
            f"with srun or torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and "
            f"MASTER_PORT"
        )
    return value


def _first_host_of(env: Mapping[str, str]) -> str:
    return first_host(env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", "localhost")))


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list: ``n[03-05,9],m1`` starts with ``n03``.

    Raises:
        ValueError: ``nodes`` is not understood.
    """
    match = re.match(r"([^,\[\]\s]+)(?:\[(\w+)[^\[\]]*\]([^,\[\]\s]*))?(?:,|$)", nodes)
    if match is None:
        raise ValueError(f"SLURM's node list {nodes!r} is not understood: set MASTER_ADDR")
    return "".join(part or "" for part in match.groups())


def _tasks_on_first_node(env: Mapping[str, str]) -> str:
    name = "SLURM_STEP_TASKS_PER_NODE"
    tasks = env.get(name, env.get("SLURM_TASKS_PER_NODE", "1"))
    return _of_slurm({name: re.split(r"[(,]", tasks)[0]}, name)


def _has_gpu() -> bool:
    try:
        import torch
    except (ImportError, OSError) as error:  # an OSError: the package's libraries are not found
        raise without_torch("a training", error) from error
    return torch.cuda.is_available()


def _use_cpu(words: Sequence[str]) -> list[str]:
    """Apply the CPU platform to Megatron, and log it.

    Return the flags that the launch needs for it. ``words`` are those after the script.
    """
    cpu = importlib.import_module(CPU_PLATFORM)
    for name, value in cpu.environment(os.environ).items():
        os.environ.setdefault(name, value)
    flags: list[str] = cpu.default_flags(words)
    apply(cpu.patches())
    if os.environ.get("RANK", "0") == "0":
        logger.info(cpu.NOTICE)
    return flags
