"""Report of a check of a launch command.

One command may have several mistakes, and a user should see all of them at once. So checks add
findings to a report and go on, and predictions are made of what is right. ``--json`` prints the
same report.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from megatron_ext.patches.engine import PatchError


class Severity(StrEnum):
    """Severity of a finding.

    RIGHT: checked and fine. REMARK: worth a look, or cannot be known here. WRONG: will fail.
    """

    RIGHT = "right"
    REMARK = "remark"
    WRONG = "wrong"


@dataclass(frozen=True)
class Finding:
    """Finding of a check: one line of doctor's report.

    ``fix`` says what to do; empty if nothing has to be done.
    """

    verdict: Severity
    subject: str
    text: str
    fix: str = ""


@dataclass(frozen=True)
class RankPrediction:
    """Predicted memory of a pipeline rank.

    Attributes:
        model_bytes: bytes of parameters, gradients and optimizer states.
        temporary_bytes: bytes of the largest pass while it runs.
        context_bytes: bytes of CUDA's context, workspaces and NCCL's buffers.
        activation_bytes: bytes of activations at their peak; None if unknown.
    """

    rank: int
    layers: int
    model_bytes: float
    temporary_bytes: float
    context_bytes: float
    activation_microbatches: float
    activation_bytes: float | None

    @property
    def total_bytes(self) -> float:
        """Sum of the known bytes on this rank."""
        known = self.model_bytes + self.temporary_bytes + self.context_bytes
        return known + (self.activation_bytes or 0)


@dataclass(frozen=True)
class Prediction:
    """Prediction for the first step of a launch.

    Attributes:
        costs: origin of the costs.
        bubble, bubble_1f1b: idle shares of the makespan under the launch's schedule, and under
            1F1B; None if there is no estimate.
        ranks: memory of each rank; empty if it cannot be estimated.
    """

    schedule: str
    microbatches: int
    costs: str
    bubble: float | None
    bubble_1f1b: float | None
    ranks: tuple[RankPrediction, ...] = ()

    def as_data(self) -> dict[str, Any]:
        """Return the prediction as ``--json`` prints it."""
        data = asdict(self)
        if not self.ranks:
            del data["ranks"]
        return data


@dataclass
class Report:
    """Report of doctor on a launch: its findings, and predictions for what is right.

    Attributes:
        unchecked: what could not be checked here, and why; empty if everything was checked.
    """

    findings: list[Finding] = field(default_factory=list)
    prediction: Prediction | None = None
    unchecked: str = ""

    def add(self, verdict: Severity, subject: str, text: str, fix: str = "") -> None:
        if not any(finding.text == text for finding in self.findings):
            self.findings.append(Finding(verdict, subject, text, fix))

    def attempt[T](
        self,
        subject: str,
        work: Callable[[], T],
        fix: str = "",
        right: Callable[[T], str] | None = None,
    ) -> T | None:
        """Return the result of ``work``, and add a finding on it; None if ``work`` refuses.

        The finding has the text that ``right`` makes of the result, or the reason of the refusal.
        """
        try:
            result = work()
        except (ValueError, PatchError) as error:
            self.add(Severity.WRONG, subject, str(error), fix)
            return None
        if right is not None and (text := right(result)):
            self.add(Severity.RIGHT, subject, text)
        return result

    @property
    def is_right(self) -> bool:
        return all(finding.verdict is not Severity.WRONG for finding in self.findings)

    def as_data(self) -> dict[str, Any]:
        """Return the report as ``--json`` prints it."""
        return {
            "right": self.is_right,
            "findings": [asdict(finding) for finding in self.findings],
            "prediction": {} if self.prediction is None else self.prediction.as_data(),
            **({"unchecked": self.unchecked} if self.unchecked else {}),
        }
