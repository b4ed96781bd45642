"""Words of a launch command that are neither Megatron's flags nor ours."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from megatron_ext.config import PipelineConfig, flag
from megatron_ext.secrets import masked
from megatron_ext.words import meant_by

SURELY_MEANT = 0.9  # difflib's likeness from which an unknown flag is one of Megatron's misspelt


@dataclass(frozen=True)
class WordFinding:
    """Judgement of words of a launch command: right, perhaps right ("remark"), or a mistake.

    ``fix`` says what to do about it; "" if nothing has to be done.
    """

    verdict: Literal["right", "remark", "wrong"]
    text: str
    fix: str = ""


def unknown_words(
    argv: Sequence[str], unknown: Sequence[str], flags: Sequence[str], script: str | None
) -> Iterator[WordFinding]:
    """Yield what the ``unknown`` words of ``argv`` are, given the known ``flags``.

    A word that is nearly a flag of Megatron's or of ours is that flag misspelt. Any other word may
    be the script's own.

    Args:
        script: text of the script; None if it cannot be read.
    """
    for word in unknown:
        name = word.split("=")[0]
        if not name.startswith("--"):
            before = [argv[i - 1] for i in range(1, len(argv)) if argv[i] == word]
            if not any(other in unknown for other in before):
                text = f"{word!r} belongs to no flag"
                fix = _quoted(argv, word) or "drop it: the flag before it takes no value"
                yield WordFinding("wrong", text, fix)
        elif script is not None and name in script:
            yield WordFinding("right", f"{name} is the script's own")
        else:
            yield _unknown_flag(name, flags)


def _quoted(argv: Sequence[str], word: str) -> str:
    """Return what to do about ``word`` if it stands behind a flag that has a value already: a shell
    splits a value at its spaces. Empty if it stands behind a flag without a value."""
    at = argv.index(word)
    flag_at = max((i for i in range(at) if argv[i].startswith("--")), default=None)
    if flag_at is None:
        return ""
    name, equals, first = argv[flag_at].partition("=")
    values = [first] if equals else []
    values += itertools.takewhile(lambda other: not other.startswith("--"), argv[flag_at + 1 :])
    if values[0] == word:
        return ""
    value = " ".join(values)
    words = masked([name, value]).replace(" ", equals or " ", 1)
    return f"write {words}, quoted for the shell, if the value goes on with it; or drop it"


def _unknown_flag(name: str, flags: Sequence[str]) -> WordFinding:
    ours = meant_by(name, (flag(setting.name) for setting in fields(PipelineConfig)))
    meant = " or ".join(meant_by(name, flags) or ours)
    surely = difflib.get_close_matches(name.replace("_", "-"), flags, cutoff=SURELY_MEANT)
    if ours or surely or name.startswith(flag("")):
        fix = f"did you mean {meant}?" if meant else ""
        return WordFinding("wrong", f"there is no flag {name}", fix)
    text = f"{name} is neither Megatron's nor ours: the script's own, perhaps"
    fix = "drop it if the script does not add it: Megatron would refuse it"
    fix = f"did you mean {meant}? If not, {fix}" if meant else fix
    return WordFinding("remark", text, fix)
