"""What a check of a launch line says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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
