"""What a check of a launch line says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from megatron_ext.patches.engine import PatchError


class Verdict(StrEnum):
    """RIGHT: checked and fine; REMARK: worth a look, or cannot be told here; WRONG: will fail."""

    RIGHT = "right"
    REMARK = "remark"
    WRONG = "wrong"


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``fix`` is what to do, empty where there is nothing to do."""

    verdict: Verdict
    subject: str
    text: str
    fix: str = ""


@dataclass(frozen=True)
class RankPrediction:
    """What a pipeline rank will hold; ``activation_bytes`` is None where it is not known."""

    rank: int
    layers: int
    model_bytes: float
    activation_microbatches: float
    activation_bytes: float | None

    @property
    def total_bytes(self) -> float:
        """The sum of those bytes that are known."""
        return self.model_bytes + (self.activation_bytes or 0)


@dataclass(frozen=True)
class Prediction:
    """Of the first step's program.

    Attributes:
        costs: where they come from.
        bubble, bubble_1f1b: shares of the makespan.
        ranks: none where memory cannot be estimated.
    """

    schedule: str
    microbatches: int
    costs: str
    bubble: float
    bubble_1f1b: float
    ranks: tuple[RankPrediction, ...] = ()

    def as_data(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        data = asdict(self)
        if not self.ranks:
            del data["ranks"]
        return data


@dataclass
class Report:
    """What is found, and what is predicted as far as the line is right."""

    findings: list[Finding] = field(default_factory=list)
    prediction: Prediction | None = None

    def add(self, verdict: Verdict, subject: str, text: str, fix: str = "") -> None:
        if not any(finding.text == text for finding in self.findings):
            self.findings.append(Finding(verdict, subject, text, fix))

    def attempt[T](self, subject: str, work: Callable[[], T], fix: str = "") -> T | None:
        """What ``work`` returns, or None and a finding of what it refuses."""
        try:
            return work()
        except (ValueError, PatchError) as error:
            self.add(Verdict.WRONG, subject, str(error), fix)
            return None

    @property
    def is_right(self) -> bool:
        return all(finding.verdict is not Verdict.WRONG for finding in self.findings)

    def as_data(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        return {
            "right": self.is_right,
            "findings": [asdict(finding) for finding in self.findings],
            "prediction": {} if self.prediction is None else self.prediction.as_data(),
        }
