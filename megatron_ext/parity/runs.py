"""Sequential runs of launch commands on this machine, each recorded.

Two runs of one command may differ, because kernels sum in varying order. So command A runs twice,
and the difference of its two runs is the floor for the difference of A and B. Both commands begin
from one checkpoint, which A writes if they load none: initial weights depend on the stages of a
rank.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from megatron_ext.base.words import bytes_text, counted
from megatron_ext.config import PipelineConfig, variable
from megatron_ext.parity.run_command import RunCommand, recorded, saving
from megatron_ext.recordings.comparable import refusal

_LATEST = "latest_checkpointed_iteration.txt"
_SHOWN = 12  # number of lines that are shown of a failed run's output
_LONGEST = 10_000  # longest line shown of a failed run's output, in characters
# Patterns of errors that end a rank: of megatron_ext, of argparse, the last line of a Python
# traceback, and of C++. torchrun's own report follows them and names no reason.
_REASON = re.compile(
    r"\berror\b[^:]*: |^(\[rank\d+\]:\s*)?(\w+\.)*\w*(Error|Exception)(:|$)|^\s+what\(\): "
)
# Patterns of lines that do not continue an error: lines of torch's log, of another traceback, and
# empty lines.
_UNRELATED = re.compile(r"[IWE]\d{4} |(\[rank\d+\]:\s*)?(Traceback|$)")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)

# Function that receives text when a run starts, and when it ends, with a newline.
TellRun = Callable[[str], None]


@dataclass(frozen=True)
class RecordedRuns:
    """Folders of the recordings that a comparison needs.

    Attributes:
        a, second, b: recordings of command A, of A a second time, and of command B.
        loading: arguments with which each run loads its checkpoint.
    """

    a: Path
    second: Path
    b: Path
    loading: tuple[str, ...] = ()


def run_both(
    a: RunCommand,
    b: RunCommand,
    folder: Path,
    iterations: int,
    from_seed: bool,
    is_stock: bool,
    tell: TellRun,
) -> RecordedRuns:
    """Record command A twice and command B once, all from one checkpoint.

    Args:
        folder: new folder for recordings, logs and the checkpoint.
        iterations: number of iterations of each run.
        from_seed: whether to use no checkpoint, so that each run draws its weights from its seed.
        is_stock: whether A is B's command without our flags; our variables are then unset for A.
        tell: function that receives lines on the progress.

    Raises:
        ValueError: a run failed, the disk is too small, or ``folder`` has files already.
    """
    _make(folder)
    places = RecordedRuns(folder / "A", folder / "A-second", folder / "B")
    runs = _Runs(folder, tell)
    load = _loading(a, b, from_seed)
    if load is None:
        checkpoint = folder / "checkpoint"
        try:
            runs.run("A writes a checkpoint", "checkpoint", saving(a, checkpoint), is_stock)
            if not (checkpoint / _LATEST).is_file():
                raise ValueError(
                    f"the run of command A wrote no checkpoint: see {folder}/checkpoint.log"
                )
        except ValueError as error:
            raise ValueError(
                f"{error}\nIf Megatron cannot save this model, add --from-seed: both "
                f"commands then start from the seed, which needs the same layers on each rank"
            ) from None
        _check_disk(folder, 3 * _size(checkpoint), "3 recordings")
        load = ["--load", str(checkpoint), "--ckpt-format", "torch_dist"]
    many = counted(iterations, "iteration")
    runs.run(f"A, {many}", "A", recorded(a, places.a, iterations, load), is_stock)
    _check_disk(folder, 2 * _size(places.a), "2 more recordings")
    runs.run("second run of A", "A-second", recorded(a, places.second, iterations, load), is_stock)
    runs.run(f"B, {many}", "B", recorded(b, places.b, iterations, load), False)
    return replace(places, loading=tuple(load))


def run_reversed(
    a: RunCommand, places: RecordedRuns, iterations: int, is_stock: bool, tell: TellRun
) -> Path:
    """Record command A with the microbatches of each step in reverse order.

    Return the folder of the recording. Arguments and errors are as for `run_both`.

    Args:
        places: folders of the recordings so far, next to which the new one is made.
    """
    folder = places.a.parent
    made = folder / "A-reversed"
    _check_disk(folder, _size(places.a), "1 more recording")
    words = recorded(a, made, iterations, places.loading, is_reversed=True)
    runs = _Runs(folder, tell)
    runs.run("A with its microbatches reversed", made.name, words, is_stock)
    return made


def _make(folder: Path) -> None:
    try:
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(
                f"{folder} exists already: name another folder with --dir, or remove this one"
            )
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--dir {folder} cannot be made: {error.strerror}") from None


def _loading(a: RunCommand, b: RunCommand, from_seed: bool) -> list[str] | None:
    """Return the arguments that make both commands load one checkpoint.

    Return an empty list if both load the same one already, or if they start from their seed, and
    None if command A has to write one first.

    Raises:
        ValueError: the commands load different checkpoints, or only one of them loads one.
    """
    named = [command.value("--load") for command in (a, b)]
    there = [name is not None and (Path(name) / _LATEST).is_file() for name in named]
    if all(there) and named[0] != named[1]:
        raise ValueError(
            f"the commands load different checkpoints, --load {named[0]} and {named[1]}: give "
            "both commands the same --load, or drop --load from both"
        )
    if any(there) and not all(there):
        raise ValueError(
            "one of the commands loads a checkpoint and the other does not: give both commands the "
            "same --load"
        )
    return [] if all(there) or from_seed else None


class _Runs:
    def __init__(self, folder: Path, tell: TellRun) -> None:
        self._folder = folder
        self._tell = tell

    def run(self, what: str, name: str, words: Sequence[str], is_stock: bool) -> None:
        """Run a command to its end, with its output in a log.

        Args:
            what: description of the run, for a line on the progress.
            name: name of the log.
            words: words of the command.
            is_stock: whether variables that set options of ours are unset for the run.

        Raises:
            ValueError: the command cannot be started, or it failed.
        """
        log = self._folder / f"{name}.log"
        self._tell(f"{what} ... ")
        start = time.monotonic()
        command = ["env", *words] if _ASSIGNMENT.fullmatch(words[0]) else list(words)
        cannot = f"{log} cannot be written"
        try:
            with log.open("w") as output:
                cannot = f"{command[0]} cannot be run"
                status = subprocess.call(
                    command, stdout=output, stderr=subprocess.STDOUT, env=_environment(is_stock)
                )
        except OSError as error:
            self._tell("failed\n")
            raise ValueError(f"{cannot}: {error.strerror}") from None
        if status:
            self._tell("failed\n")
            raise ValueError(_failure(what, status, log))
        self._tell(f"{time.monotonic() - start:.1f} s\n")


def _environment(is_stock: bool) -> Mapping[str, str]:
    """Return the variables of a run: this process's, with its ``python`` first in PATH."""
    ours = {variable(field.name) for field in fields(PipelineConfig)} if is_stock else set()
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return {
        **kept,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")]),
    }


def _failure(what: str, status: int, log: Path) -> str:
    text = f"{what}: the run failed with exit status {status}; its output is in {log}"
    with log.open(errors="replace") as file:
        output = (printed.rstrip("\n") for printed in iter(partial(file.readline, _LONGEST), ""))
        last = deque[str](maxlen=_SHOWN)
        if reason := _reason(output, last):
            return f"{text}\nIt says first: {reason}"
    return "\n  ".join([f"{text}, and ends with", *last])


def _reason(output: Iterator[str], last: deque[str]) -> str:
    """Return the error that ended a rank, with the lines that continue it; "" if there is none.

    Args:
        output: lines that the run printed, which are read up to the error.
        last: receives the lines before the error, of which it keeps the last ones.
    """
    for printed in output:
        if _REASON.search(printed):
            following = takewhile(_goes_on, islice(output, _SHOWN - 1))
            return "\n".join([printed, *following]).strip()
        last.append(printed)
    return ""


def _goes_on(printed: str) -> bool:
    return not (_REASON.search(printed) or _UNRELATED.match(printed))


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _check_disk(folder: Path, needed: int, what: str) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ValueError(
            f"no room in {folder}: {what} need about {bytes_text(needed)}, and its disk has "
            f"{bytes_text(free)} left; name a folder on a larger disk with --dir"
        )


def check_comparable(a: RunCommand, b: RunCommand) -> None:
    """Raise ValueError unless two commands train the same model on the same data in the same way.

    Neither command runs for the check. Without Megatron on this machine nothing is checked here;
    the recordings are compared after both runs.

    Raises:
        ValueError: the commands train another model, on other data or in another way, or Megatron's
            parser rejects one of them.
    """
    parsed = [_arguments(command, name) for command, name in ((a, "A"), (b, "B"))]
    if any(arguments is None for arguments in parsed):
        # Without Megatron on this machine the two commands cannot be compared in advance; their
        # recordings are compared later.
        return
    one, other = (arguments or {} for arguments in parsed)
    both = {name for name in one if one[name] is not None and other.get(name) is not None}
    a_both, b_both = ({name: values[name] for name in both} for values in (one, other))
    if why := refusal(a_both, b_both, "the commands"):
        raise ValueError(why)


def _arguments(command: RunCommand, name: str) -> dict[str, Any] | None:
    from megatron_ext.launch.command.importing import as_on, quickly, silently

    with ExitStack() as stack:
        stack.enter_context(silently())
        stack.enter_context(as_on(Path.cwd(), {}))
        try:
            with quickly():
                from megatron_ext.launch.command import megatron_arguments
        except ImportError:
            return None
        try:
            return dict(vars(megatron_arguments.parse_arguments(command.arguments).args))
        except ValueError as error:
            raise ValueError(f"command {name}: {error}") from None
