"""The evidence of tests for the features that a recipe switches on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from scripts.evaluation.recipes.recipe import Recipe
from tests.helpers.covers.feature import Feature
from tests.helpers.covers.markers import Shown
from tests.helpers.covers.vocabulary import GRADES, TOGETHER, features, is_known

# Features that some test has to show: one, or two in one training.
Wanted = tuple[Feature, ...]


@dataclass(frozen=True)
class Tested:
    """Evidence for a recipe.

    Attributes:
        grade: grade of the feature that is shown worst; None if a feature is shown by no test.
        missing: features that no test shows under the recipe's kind of schedule.
    """

    grade: str | None
    missing: tuple[Wanted, ...]


class Evidence:
    """Evidence of all tests together."""

    def __init__(self, shown: Iterable[Shown]) -> None:
        self._of_kind: dict[str, list[Shown]] = {}
        self._grades: dict[tuple[str, Wanted], str | None] = {}
        for test in shown:
            for kind in test.kinds:
                self._of_kind.setdefault(kind, []).append(test)

    def grade(self, kind: str, wanted: Wanted) -> str | None:
        """Return the best grade of a test that has all of ``wanted`` under this ``kind`` of
        schedule; None if there is no such test."""
        key = kind, wanted
        if key not in self._grades:
            grades = [
                shown.grade
                for shown in self._of_kind.get(kind, ())
                if shown.features.issuperset(wanted)
            ]
            self._grades[key] = min(grades, default=None, key=GRADES.index)
        return self._grades[key]

    def of(self, kind: str, features: frozenset[Feature]) -> Tested:
        """Return the evidence for a recipe that switches ``features`` on, under that ``kind`` of
        schedule."""
        grades = {wanted: self.grade(kind, wanted) for wanted in wanted_of(features)}
        missing = tuple(wanted for wanted, grade in grades.items() if grade is None)
        shown = [grade for grade in grades.values() if grade is not None]
        worst = max(shown, default="A", key=GRADES.index)
        return Tested(None if missing else worst, missing)


def wanted_of(features: frozenset[Feature]) -> list[Wanted]:
    """Return what tests have to show for ``features``: each feature, and each pair of features that
    one test must have together."""
    ordered = sorted(features)
    of_setting: dict[str, list[Feature]] = {}
    for feature in ordered:
        of_setting.setdefault(feature.setting, []).append(feature)
    wanted: list[Wanted] = [(feature,) for feature in ordered]
    for first, second in TOGETHER:
        wanted += product(of_setting.get(first, ()), of_setting.get(second, ()))
    return wanted


def features_of(recipe: Recipe) -> frozenset[Feature]:
    """Return the features that ``recipe`` switches on and that a test has to show. They include the
    settings that only Megatron knows, although no test can show these."""
    named = {name: value for name, value in recipe.settings.items() if is_known(name)}
    return features(named) | {Feature(name) for name in recipe.settings.keys() - named.keys()}


def kind_of(recipe: Recipe) -> str:
    """Return the kind of schedule that has as many stages on a rank as ``recipe``."""
    return "line" if recipe.chunks == 1 else "loop"
