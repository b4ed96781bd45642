"""Check that the flags of a launch command are known, as findings of doctor's report."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ext.launch.command.script_texts import ScriptTexts
from megatron_ext.launch.command.unknown_words import WordFinding, unknown_words
from megatron_ext.launch.doctor.launch_report import Finding, Severity


def finding_of(word: WordFinding, subject: str) -> Finding:
    return Finding(Severity(word.verdict), subject, word.text, word.fix)


def check_words(
    argv: Sequence[str], unknown: Sequence[str], flags: Sequence[str], texts: ScriptTexts | None
) -> list[Finding]:
    """Return doctor's findings on ``unknown`` words of ``argv``, as `unknown_words` has them."""
    findings = [finding_of(word, "flags") for word in unknown_words(argv, unknown, flags, texts)]
    if not any(finding.verdict is Severity.WRONG for finding in findings):
        text = "all others are Megatron's or ours" if findings else "all are Megatron's or ours"
        findings.append(Finding(Severity.RIGHT, "flags", text))
    return findings
