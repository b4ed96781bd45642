"""Features of a program, in the order in which their hooks are called.

`build` names no feature; only this table knows all of them. The order is that of their transforms:
pairs and the vocabulary's passes come before messages, copies to the host after them.
"""

from __future__ import annotations

from megatron_ext.compile.build_hooks import BuildHooks
from megatron_ext.compile.joined_weights import JoinedWeightsBuild
from megatron_ext.compile.pairs import OverlapBuild
from megatron_ext.compile.recompute import RecomputeBuild
from megatron_ext.features.offload.schedule.offload_build import OffloadBuild
from megatron_ext.features.post_validation.schedule import PostValidationBuild
from megatron_ext.features.vocabulary.schedule.vocabulary_build import VocabularyBuild
from megatron_ext.schedule.problem import Problem

FEATURES: tuple[BuildHooks, ...] = (
    OverlapBuild(),
    VocabularyBuild(),
    RecomputeBuild(),
    JoinedWeightsBuild(),
    OffloadBuild(),
    PostValidationBuild(),
)


def build_hooks_of(problem: Problem) -> list[BuildHooks]:
    """Return the hooks of those features (such as recompute) that are on in the program of
    ``problem``."""
    return [feature for feature in FEATURES if feature.is_on(problem)]
