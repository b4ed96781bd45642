"""What is installed here, and how the patches stand to it."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

import megatron_ext
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, PatchError, applied, mismatch, resolve
from megatron_ext.patches.features import FEATURES

PACKAGES = ("transformer-engine", "torch", "numpy")
ON_ROCM = (
    "untried. torch's CUDA names work through HIP, and its nccl is RCCL; Transformer Engine would "
    "be ROCm's fork, which the patches were not read against"
)


def diagnose(config: PipelineConfig) -> dict[str, Any]:
    """The environment, and a row for each patch of each feature.

    A patch's ``state`` is "applied" (in this process), "would be applied" (``config`` wants it and
    it fits), "not wanted", or "does not fit: " and why.
    """
    return {"environment": _environment(), "patches": _patches(config)}


def _environment() -> dict[str, str]:
    found = {
        "megatron_ext": megatron_ext.__version__,
        "python": platform.python_version(),
        "megatron-core": _megatron(),
    }
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    try:
        import torch
    except ImportError:
        return found
    found["CUDA"] = torch.version.cuda or "none in this torch"
    found["ROCm"] = f"{torch.version.hip}: {ON_ROCM}" if torch.version.hip else "none in this torch"
    found["GPUs"] = ", ".join(
        torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
    ) or ("none: the CPU platform would be used")
    return found


def _megatron() -> str:
    """The version that is imported, and from where: a checkout may hide an installed one."""
    try:
        version = resolve("megatron.core:__version__")
    except PatchError:
        return "not installed"
    number = version.original.partition("+")[0]  # then comes the commit of any repository around
    return f"{number} ({Path(version.owner.__file__).parent})"


def _patches(config: PipelineConfig) -> list[dict[str, str]]:
    rows = []
    # Without a schedule its patches are listed for a typical one.
    example = config if config.schedule else PipelineConfig(schedule="zb-h1")
    ours = config.schedule is not None  # without a flag of ours nothing is patched at all
    in_force = {patch.target for patch in applied()}
    for feature in FEATURES:
        try:
            patches = feature.patches(example)
        except PatchError as error:
            state = f"does not fit: {error}"
            rows.append(
                {"feature": feature.name, "target": "", "how": "", "reason": "", "state": state}
            )
            continue
        for patch in patches:
            rows.append(
                {
                    "feature": feature.name,
                    "target": patch.target,
                    "how": patch.how.value,
                    "reason": patch.reason,
                    "state": _state(patch, in_force, wanted=ours and feature.is_wanted(config)),
                }
            )
    return rows


def _state(patch: Patch, in_force: set[str], wanted: bool) -> str:
    if patch.target in in_force:
        return "applied"
    try:
        problem = mismatch(patch, resolve(patch.target).original)
    except PatchError as error:
        problem = str(error)
    if problem is not None:
        return f"does not fit: {problem}"
    return "would be applied" if wanted else "not wanted"
