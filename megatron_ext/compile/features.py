"""Features of a program, in the order in which their hooks are called."""

from __future__ import annotations

from megatron_ext.compile.build_hooks import BuildHooks
from megatron_ext.compile.pairs import OverlapBuild
from megatron_ext.compile.recompute import RecomputeBuild
from megatron_ext.compile.transform_hooks import (
    OffloadBuild,
    PostValidationBuild,
    VocabularyBuild,
)
from megatron_ext.schedule.problem import Problem

FEATURES: tuple[BuildHooks, ...] = (
    OverlapBuild(),
    VocabularyBuild(),
    RecomputeBuild(),
    OffloadBuild(),
    PostValidationBuild(),
)


def build_hooks_of(problem: Problem) -> list[BuildHooks]:
    """Return the hooks of the features that the program of ``problem`` has."""
    return [feature for feature in FEATURES if feature.is_on(problem)]
