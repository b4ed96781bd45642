"""What is installed here, and how the patches stand to it."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import megatron_ext
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, PatchError, applied, mismatch, resolve
from megatron_ext.patches.features import FEATURES

PACKAGES = ("transformer-engine", "torch", "numpy")
ON_ROCM = (
    "untried. torch's CUDA names work through HIP, and its nccl is RCCL; Transformer Engine would "
    "be ROCm's fork, which the patches were not read against"
)


@dataclass(frozen=True)
class PatchState:
    """A patch of a feature, or a feature whose patches cannot be told.

    Attributes:
        state: "applied" (in this process), "would be applied" (it is wanted and fits), "not
            wanted", or "does not fit: " and why.
    """

    feature: str
    target: str
    how: str
    reason: str
    state: str

    @property
    def fits(self) -> bool:
        return not self.state.startswith(_MISFIT)


_MISFIT = "does not fit: "


@dataclass(frozen=True)
class Diagnosis:
    """What is installed, by name, and each patch of each feature."""

    environment: Mapping[str, str]
    patches: tuple[PatchState, ...]


def diagnose(config: PipelineConfig) -> Diagnosis:
    """The environment, and how the patches stand to it with ``config``."""
    return Diagnosis(_environment(), tuple(_patches(config)))


def _environment() -> dict[str, str]:
    versions = {
        "megatron_ext": megatron_ext.__version__,
        "python": platform.python_version(),
        "megatron-core": _megatron(),
    }
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    try:
        import torch
    except ImportError:
        return versions
    versions["CUDA"] = torch.version.cuda or "none in this torch"
    versions["ROCm"] = (
        f"{torch.version.hip}: {ON_ROCM}" if torch.version.hip else "none in this torch"
    )
    versions["GPUs"] = ", ".join(
        torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
    ) or ("none: the CPU platform would be used")
    return versions


def _megatron() -> str:
    """The version that is imported, and from where: a checkout may hide an installed one."""
    try:
        version = resolve("megatron.core:__version__")
    except PatchError:
        return "not installed"
    number = version.original.partition("+")[0]  # then comes the commit of any repository around
    return f"{number} ({Path(version.owner.__file__).parent})"


def _patches(config: PipelineConfig) -> Iterator[PatchState]:
    # Without a schedule its patches are listed for a typical one.
    example = config if config.schedule else PipelineConfig(schedule="zb-h1")
    ours = config.schedule is not None  # without a flag of ours nothing is patched at all
    in_force = {patch.target for patch in applied()}
    for feature in FEATURES:
        try:
            patches = feature.patches(example)
        except PatchError as error:
            yield PatchState(feature.name, "", "", "", f"{_MISFIT}{error}")
            continue
        for patch in patches:
            state = _state(patch, in_force, wanted=ours and feature.is_wanted(config))
            yield PatchState(feature.name, patch.target, patch.how.value, patch.reason, state)


def _state(patch: Patch, in_force: set[str], wanted: bool) -> str:
    if patch.target in in_force:
        return "applied"
    try:
        problem = mismatch(patch, resolve(patch.target).original)
    except PatchError as error:
        problem = str(error)
    if problem is not None:
        return f"{_MISFIT}{problem}"
    return "would be applied" if wanted else "not wanted"
