"""Programs that start the ranks in torchrun's place, or around it.

The arguments of these programs (srun, env, containers and others) say how many ranks a command
starts, and with which environment variables. Arguments of unknown meaning are ignored.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

_JOINED = re.compile(r"(-[A-Za-z])(\d+)")  # a short option with its number, as -n16
# Separators of entries: a comma counts only before a key, as values may contain commas.
_SEPARATOR = re.compile(r",(?=[A-Za-z_]\w*(?:=|,|$))")
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class _Launcher:
    """Options of a launcher program, such as srun or mpirun, by their meaning.

    Attributes:
        subcommand: second word of the program; "" if it has none.
        processes: flags of the number of processes on all nodes together.
        nodes: flags of the number of nodes.
        per_node: flags of the number of processes on each node.
        hosts: flags that name nodes, without which the program starts one; empty if a scheduler
            knows the nodes.
        variables: flags of environment variables as NAME=VALUE, with commas between several. A name
            alone exports a variable that is set.
        named_values: flags of a variable whose value may be the next word.
        is_python: whether the program starts Python itself, so that its words name the script or
            module.
        rank_variable: variable in which a process finds its rank, if RANK is not set.
    """

    subcommand: str = ""
    processes: frozenset[str] = frozenset()
    nodes: frozenset[str] = frozenset()
    per_node: frozenset[str] = frozenset()
    hosts: frozenset[str] = frozenset()
    variables: frozenset[str] = frozenset()
    named_values: frozenset[str] = frozenset()
    is_python: bool = False
    rank_variable: str = ""


# Variables with the rank of a process, of SLURM and of Open MPI.
SLURM_RANK, MPI_RANK = "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"
_SLURM = _Launcher(
    processes=frozenset({"-n", "--ntasks"}),
    nodes=frozenset({"-N", "--nodes"}),
    per_node=frozenset({"--ntasks-per-node"}),
    variables=frozenset({"--export"}),
    rank_variable=SLURM_RANK,
)
_MPI = _Launcher(
    processes=frozenset({"-n", "--n", "-np", "--np", "-c"}),
    per_node=frozenset({"-N", "-npernode", "--npernode", "-ppn", "--ppn", "-perhost"}),
    variables=frozenset({"-x"}),
    named_values=frozenset({"-env", "-genv"}),
    rank_variable=MPI_RANK,
)
_LAUNCHERS: Mapping[str, _Launcher] = {
    "env": _Launcher(),
    **dict.fromkeys(("srun", "salloc", "sbatch"), _SLURM),
    **dict.fromkeys(("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun"), _MPI),
    **dict.fromkeys(("docker", "podman"), _Launcher("run", variables=frozenset({"-e", "--env"}))),
    **dict.fromkeys(
        ("apptainer", "singularity"), _Launcher("exec", variables=frozenset({"--env"}))
    ),
    "accelerate": _Launcher(
        "launch", processes=frozenset({"--num_processes", "--num-processes"}), is_python=True
    ),
    "deepspeed": _Launcher(
        nodes=frozenset({"--num_nodes"}),
        per_node=frozenset({"--num_gpus", "--num_accelerators"}),
        hosts=frozenset({"-H", "--hostfile", "-i", "--include"}),
        is_python=True,
    ),
}
# Python modules that do the same as the launcher programs above.
OF_MODULES = {
    "accelerate.commands.launch": ("accelerate", "launch"),
    "deepspeed.launcher.runner": ("deepspeed",),
}
MODULE = ("-m", "--module")


@dataclass(frozen=True)
class Started:
    """Processes that programs before the script start, and their variables.

    Attributes:
        processes: number of processes; None if the words do not say.
        nodes: number of nodes; None if the words do not say.
        environment: variables that the words set.
        ignored: words that are not understood, each after the program that it belongs to.
        rank_variable: variable in which a process finds its rank; "" for RANK.
    """

    processes: int | None = None
    nodes: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    rank_variable: str = ""


def _starts_python(words: Sequence[str]) -> bool:
    """Return whether ``words`` begin with a program that starts Python itself."""
    launcher = _LAUNCHERS.get(Path(words[0]).name)
    return launcher is not None and launcher.is_python


def script_behind(words: Sequence[str]) -> int | None:
    """Return the index of the script in ``words`` if they begin with a program that starts Python.

    The script is ``x.py`` or ``-m``. None without such a program or script.
    """
    if not _starts_python(words):
        return None
    scripts = (i for i, word in enumerate(words) if word in MODULE or word.endswith(".py"))
    return next(scripts, None)


def read_launchers(words: Sequence[str], outer: Started) -> Started:
    """Return what the launcher programs in ``words`` start, each run by the one before it.

    An example is ``srun -n 16 apptainer exec --env A=1 image``. ``outer`` is what starts the first
    program.
    """
    started = replace(outer, environment={}, ignored=())
    for program in _programs(words):
        inner = _read(program)
        started = Started(
            inner.processes or started.processes,
            inner.nodes or started.nodes,
            {**started.environment, **inner.environment},
            (*started.ignored, *inner.ignored),
            "" if _starts_python(program) else inner.rank_variable or started.rank_variable,
        )
    return started


def _programs(words: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the words of each launcher program in ``words``, from its name on."""
    if not words:
        return
    starts = [i for i, word in enumerate(words) if i == 0 or Path(word).name in _LAUNCHERS]
    for begin, end in zip(starts, [*starts[1:], len(words)], strict=True):
        yield words[begin:end]


def _read(words: Sequence[str]) -> Started:
    launcher = _LAUNCHERS.get(Path(words[0]).name)
    if launcher is None:
        return Started(ignored=tuple(words))
    names = 1 + (words[1:2] == [launcher.subcommand])
    given, unknown = _given(launcher, words[names:])
    nodes = _number(given, launcher.nodes)
    per_node = _number(given, launcher.per_node)
    processes = _number(given, launcher.processes)
    has_hosts = any(flag in launcher.hosts for flag, _ in given)
    if nodes is None and launcher.hosts and not has_hosts:
        nodes = 1
    if processes is None and nodes is not None and per_node is not None:
        processes = nodes * per_node
    variables = launcher.variables | launcher.named_values
    values = [value for flag, value in given if flag in variables]
    found = filter(None, map(_VARIABLE.fullmatch, _SEPARATOR.split(",".join(values))))
    environment = {variable[1]: variable[2] for variable in found}
    ignored = (*words[:names], *unknown) if unknown else ()
    return Started(processes, nodes, environment, ignored, launcher.rank_variable)


def _given(launcher: _Launcher, words: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the flags of ``launcher`` in ``words`` with their values, and all other words."""
    known = frozenset().union(
        launcher.processes,
        launcher.nodes,
        launcher.per_node,
        launcher.hosts,
        launcher.variables,
        launcher.named_values,
    )
    given: list[tuple[str, str]] = []
    unknown: list[str] = []
    rest = deque(words)
    while rest:
        word = rest.popleft()
        joined = _JOINED.fullmatch(word)
        flag, equals, value = (joined[1], "=", joined[2]) if joined else word.partition("=")
        if flag not in known:
            unknown.append(word)
            continue
        if not equals:
            value = rest.popleft() if rest else ""
        if flag in launcher.named_values and "=" not in value and rest:
            value = f"{value}={rest.popleft()}"
        given.append((flag, value))
    return given, unknown


def _number(given: Sequence[tuple[str, str]], flags: frozenset[str]) -> int | None:
    """Return the last value given for ``flags``, as programs do.

    None if it is no plain number, but a variable of the shell's or a range.
    """
    values = [value for flag, value in given if flag in flags]
    return int(values[-1]) if values and values[-1].isdecimal() else None
