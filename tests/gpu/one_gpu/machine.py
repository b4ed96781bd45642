"""Device and versions with which a table was made."""

from __future__ import annotations

import ctypes
import datetime
import importlib.metadata
import os
import platform
import subprocess

from tests.gpu.one_gpu.rows import run_case, tell


def main() -> None:
    tell("date", f"{datetime.date.today():%Y-%m-%d}")
    tell("megatron_ext", _commit())
    tell("Python", platform.python_version())
    for package in ("megatron-core", "transformer_engine", "triton"):
        try:
            tell(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            tell(package, "none")
    import torch

    tell("torch", f"{torch.__version__}, CUDA {torch.version.cuda}")
    if torch.cuda.is_available():
        tell("NCCL", ".".join(map(str, nccl_version())))
        device = torch.cuda.get_device_properties(0)
        words = f"{device.name}, {device.multi_processor_count} SMs, "
        tell("device", words + f"{device.total_memory / 2**30:.0f} GiB, driver {_driver()}")
    else:
        tell("device", "none: a rehearsal on the CPU, none of its figures is a GPU's")
    tell("CUDA_DEVICE_MAX_CONNECTIONS", os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "not set"))


def nccl_version() -> tuple[int, int, int]:
    """Return the version of the NCCL that is loaded; torch's own function names the one with which
    torch was compiled."""
    import torch  # noqa: F401  # loads it

    code = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(code))
    return code.value // 10_000, code.value // 100 % 100, code.value % 100


def _commit() -> str:
    return _said("git", "describe", "--always", "--dirty") or "of an unknown commit"


def _driver() -> str:
    drivers = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return drivers.splitlines()[0] if drivers else "unknown"


def _said(*words: str) -> str:
    try:
        ended = subprocess.run(words, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout.strip() if ended.returncode == 0 else ""


if __name__ == "__main__":
    run_case("machine", main)
