"""Process that has imported everything, and forks each rank of a rehearsal.

    python -m megatron_ext.rehearsal.server            requests come as lines of paths
    python -m megatron_ext.rehearsal.server REQUEST    one rank, in this process

Importing torch, Megatron and Transformer Engine takes 20 s, and a fork none. A forked process can
use CUDA only if this one never has, which is checked before the first fork. Each line of the output
is a JSON object: the first says whether the process has used CUDA, the others have the exit status
of each rank.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import IO

from megatron_ext.base.text_file import write_text_file
from megatron_ext.base.words import shown
from megatron_ext.rehearsal.request import FAILURE, load_request

# Modules whose import loads torch, Megatron and Transformer Engine as a training does.
_RANK = "megatron_ext.rehearsal.rank"
_EVERYTHING = (
    _RANK,
    "megatron_ext.launch.command.megatron_arguments",
    "megatron_ext.adapter.step.pipeline_training",
)
LOG = "log.txt"  # name of the file with a rank's output, in its folder
_DEVICES, _DRIVER = "/dev/nvidia", "libcuda.so.1"
_NOT_BEGUN = 3  # value of CUDA_ERROR_NOT_INITIALIZED
_LONGEST = 2000  # longest description of a failure in characters


def serve() -> None:
    """Import all modules of a rank, then fork a rank for each path of a request on stdin."""
    replies = _apart_from_output()
    for name in _EVERYTHING:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # without this call each forked rank would copy the memory of all imported objects
    _reply(replies, {"used_cuda": cuda_use()})
    for line in sys.stdin:
        _reply(replies, {"status": _in_fork(Path(line.rstrip("\n")))})


def _apart_from_output() -> IO[str]:
    """Return a stream to the original stdout, for replies; all other output now goes to stderr."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies


def _reply(replies: IO[str], data: dict[str, object]) -> None:
    replies.write(json.dumps(data) + "\n")
    replies.flush()


def cuda_use(open_files: Path = Path("/proc/self/fd")) -> str:
    """Return how this process has used CUDA, in words; "" if it has not.

    torch does not know of a driver that another library has started, but open device files show it,
    unless NVML has opened them, which does not start CUDA.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "torch has started CUDA"
    for link in sorted(open_files.iterdir()) if open_files.is_dir() else ():
        try:
            device = os.readlink(link)
        except OSError:  # the file was closed between listing and reading
            continue
        if device.startswith(_DEVICES):
            return f"{device} is open" if _has_driver_begun() else ""
    return ""


def _has_driver_begun() -> bool:
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return True  # another library than CUDA's driver has opened the device
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_BEGUN)


def _in_fork(path: Path) -> int:
    """Run the rank of the request file ``path`` in a forked process, and return its exit status."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        status = run_rank(path)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run_rank(path: Path) -> int:
    """Run the rank of the request file ``path`` in this process, and return the exit status.

    Its output goes to a log in its folder. If it fails, the reason goes to a file there, which
    ``megatron-ext rehearse`` reads.
    """
    request = load_request(path)
    log = os.open(request.folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    try:
        importlib.import_module(_RANK).rehearse_rank(request)
    except BaseException as error:
        traceback.print_exc()
        text = " ".join(str(error).split()) or "no reason given"
        failure = f"{type(error).__name__}: {shown(text, _LONGEST)}"
        write_text_file(request.folder / FAILURE, failure + "\n")
        return 1
    return 0


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(run_rank(Path(sys.argv[1])))
    serve()
