"""Versions installed here, and whether the patches fit them.

Before anything is launched a user asks whether their environment will do. Each patch is compared
with the source that it would replace, and nothing is patched.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path

import megatron_ext
from megatron_ext.config import PipelineConfig
from megatron_ext.launch.doctor.versions import declared_versions, version_rows
from megatron_ext.patches.engine import Misfit, Patch, PatchError, applied, mismatch, resolve
from megatron_ext.patches.features import FEATURES
from megatron_ext.patches.sources import UnknownSource, allowance

PACKAGES = ("transformer-engine", "torch", "numpy")
# Optional packages of megatron_ext's extras, each with what is missing without it.
_OPTIONAL_PACKAGES = {
    "numba": ("search", "searches are about 30 times slower, and try fewer plans"),
    "ortools": ("certify", "nothing can be certified"),
    "matplotlib": ("plot", "nothing can be drawn"),
}
ON_ROCM = (
    "untried. torch's CUDA names work through HIP, and its nccl is RCCL; Transformer Engine would "
    "be ROCm's fork, which the patches were not read against"
)


# Settings with which all patches are checked if no schedule is requested.
_WITH_ALL_PATCHES = PipelineConfig.parse(schedule="zb-h1")


class State(StrEnum):
    """State of a patch in this environment.

    FITS: the patch could be applied, and no setting requires it. WOULD_BE_APPLIED: it could be
    applied, and the settings require it. APPLIED: it is in force in this process. NEEDLESS: this
    version of the target does by itself what the patch adds.
    """

    FITS = "fits"
    WOULD_BE_APPLIED = "would be applied"
    APPLIED = "applied"
    NEEDLESS = "not needed"
    MISFIT = "does not fit"


@dataclass(frozen=True)
class PatchState:
    """State of a patch of a feature, or of a feature whose patches cannot be listed.

    Attributes:
        is_required: whether the settings require the patch; without settings all patches are
            required.
        why: reason of a misfit.
        cause: error that the reason ends with; "" if there is none.
        unknown: the installed source, if the reason is that the patch was never compared with that
            source.
    """

    feature: str
    target: str
    how: str
    reason: str
    state: State
    is_required: bool
    why: str = ""
    unknown: UnknownSource | None = None
    cause: str = ""

    @property
    def fits(self) -> bool:
        return self.state is not State.MISFIT


@dataclass(frozen=True)
class Diagnosis:
    """Diagnosis of an environment: installed versions, and the state of each patch.

    ``versions`` are those known to fit. ``missing`` names a package that all patches need and that
    cannot be imported here; "" if there is none.
    """

    environment: Mapping[str, str]
    patches: tuple[PatchState, ...]
    versions: tuple[dict[str, str], ...]
    missing: str = ""

    @property
    def misfits(self) -> tuple[PatchState, ...]:
        """Required patches that do not fit the installed versions."""
        return tuple(patch for patch in self.patches if patch.is_required and not patch.fits)

    @property
    def allowance(self) -> str:
        """Value of `ALLOW_UNKNOWN` that would allow all unknown sources; "" without any."""
        unknown = [patch.unknown for patch in self.misfits if patch.unknown is not None]
        return allowance(unknown) if unknown else ""


def diagnose(config: PipelineConfig) -> Diagnosis:
    """Return the installed versions, and the state of the patches under ``config``.

    Raises:
        ValueError: the user's list of allowed sources is not understood.
    """
    patches, versions = tuple(_patches(config)), tuple(_versions())
    return Diagnosis(_environment(), patches, versions, _missing())


def _missing() -> str:
    """Return why a package that all patches need cannot be imported; "" if all can."""
    for module, name in (("torch", "torch"), ("megatron.core", "Megatron")):
        try:
            importlib.import_module(module)
        except Exception as error:  # a module may raise anything while it is imported
            return f"{name} cannot be imported here: {type(error).__name__}: {error}"
    return ""


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
    for package, (extra, lacking) in _OPTIONAL_PACKAGES.items():
        if find_spec(package) is None:
            versions[package] = f"not installed: {lacking}; pip install 'megatron_ext[{extra}]'"
    try:
        import torch
    except (ImportError, OSError):  # torch raises an OSError if its libraries are not found
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
    """Return the version of the imported Megatron and its folder, as text.

    A checkout may hide an installed Megatron; ranks that start in this folder import the folder's
    own.
    """
    here, folder, text = Path.cwd() / "megatron" / "core", None, "not installed"
    try:
        version = resolve("megatron.core:__version__")
    except PatchError:
        pass
    else:
        folder = Path(version.owner.__file__).parent
        # A version has the commit of its git repository after the plus sign.
        number = version.original.partition("+")[0]
        text = f"{number} ({folder})"
    if here.is_dir() and here.resolve() != (folder and folder.resolve()):
        text += "; not the one of this folder: PYTHONPATH=. megatron-ext doctor looks at that"
    return text


def _versions() -> list[dict[str, str]]:
    """Return the table of versions known to fit; empty if Megatron is missing.

    Without Megatron the patches cannot be listed.
    """
    try:
        patches = [patch for feature in FEATURES for patch in feature.patches(_WITH_ALL_PATCHES)]
    except PatchError:
        return []
    return version_rows(declared_versions(patches))


def _patches(config: PipelineConfig) -> Iterator[PatchState]:
    example = config if config.schedule else _WITH_ALL_PATCHES
    has_settings = config.changes_launch
    in_force = {patch.target for patch in applied()}
    for feature in FEATURES:
        is_required = not has_settings or feature.applies_to(config)
        try:
            patches = feature.patches(example)
        except PatchError as error:
            state, why, cause = State.MISFIT, str(error), str(error.__cause__ or "")
            yield PatchState(feature.name, "", "", "", state, is_required, why, cause=cause)
            continue
        for patch in patches:
            misfit = None
            if patch.target in in_force:
                state = State.APPLIED
            elif (misfit := _misfit(patch)) is not None:
                state = State.MISFIT
            else:
                state = _state_of_what_fits(patch, has_settings and is_required)
            yield PatchState(
                feature.name,
                patch.target,
                patch.how.value,
                patch.reason,
                state,
                is_required,
                misfit.text if misfit else "",
                misfit.unknown if misfit else None,
            )


def _state_of_what_fits(patch: Patch, is_asked_for: bool) -> State:
    if patch.is_needless(resolve(patch.target).original):
        return State.NEEDLESS
    return State.WOULD_BE_APPLIED if is_asked_for else State.FITS


def _misfit(patch: Patch) -> Misfit | None:
    try:
        return mismatch(patch, resolve(patch.target).original)
    except PatchError as error:
        return Misfit(str(error))
