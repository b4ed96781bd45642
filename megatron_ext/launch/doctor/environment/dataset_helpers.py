"""Whether Megatron can compile its datasets' helpers, as global rank 0 does when a job starts.

Megatron runs ``make`` in ``megatron/core/datasets``, which compiles ``helpers_cpp`` unless it is
there and newer than its source. The job ends if that fails, after all ranks have started.
"""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

from megatron_ext.launch.doctor.launch_report import Finding, Severity

_SUBJECT = "dataset helpers"
_MODULE = "megatron.core.datasets.helpers_cpp"
_HEADERS = (Path("/usr/include/pybind11"), Path("/usr/local/include/pybind11"))


def check_dataset_helpers() -> list[Finding]:
    """Return a finding if Megatron's dataset helpers are not compiled, or out of date."""
    datasets = find_spec("megatron.core.datasets")
    if datasets is None or datasets.origin is None:
        return []
    folder = Path(datasets.origin).parent
    compiled = find_spec(_MODULE)
    if compiled is not None and not _is_older(Path(compiled.origin or ""), folder / "helpers.cpp"):
        return []
    if not (folder / "Makefile").is_file():
        if compiled is not None:
            return []  # without a Makefile, as in Megatron's wheel, nothing can be compiled anew
        text = f"helpers_cpp is not compiled in {folder}, and there is no Makefile to compile it by"
        fix = "install Megatron's wheel for this Python, or take a checkout of Megatron-LM"
        return [Finding(Severity.WRONG, _SUBJECT, text, fix)]
    lacking = _lacking(folder)
    text = f"helpers_cpp is not compiled in {folder}: rank 0 runs make there when the job starts"
    if not lacking:
        return [Finding(Severity.RIGHT, _SUBJECT, text)]
    text += f", and here {' and '.join(lacking)}: Megatron would end after all ranks have started"
    fix = f"pip install pybind11, install make and g++ where they are missing; make -C {folder}"
    return [Finding(Severity.WRONG, _SUBJECT, text, fix)]


def _is_older(compiled: Path, source: Path) -> bool:
    both_are_there = compiled.is_file() and source.is_file()
    return both_are_there and compiled.stat().st_mtime < source.stat().st_mtime


def _lacking(folder: Path) -> list[str]:
    """Return the missing tools that compiling the dataset helpers takes, as phrases."""
    compiler = os.environ.get("CXX", "g++")
    lacking = [f"there is no {tool}" for tool in ("make", compiler) if shutil.which(tool) is None]
    if find_spec("pybind11") is None and not any(map(Path.is_dir, _HEADERS)):
        lacking.append("pybind11 is not installed")
    if not os.access(folder, os.W_OK):
        lacking.append("that folder cannot be written")
    return lacking
