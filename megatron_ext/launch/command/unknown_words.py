"""Words of a launch command that are neither Megatron's flags nor ours.

Scripts add flags of their own to Megatron's, so an unknown word may be right. It may also be a
misspelling, after which Megatron trains with a default. A word is a mistake only if a known flag is
surely meant; otherwise it is a remark.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from megatron_ext.base.secrets import masked
from megatron_ext.base.words import has_similar_words, is_opposite, meant_by
from megatron_ext.config import PipelineConfig, flag
from megatron_ext.launch.command.script_texts import ScriptTexts

# Flags of older versions of Megatron and of Megatron-DeepSpeed, and what replaces them today.
# (Megatron-LM has --recompute-granularity and the like since 3.0, and --fp8-format since 0.5.)
RENAMED = {
    "--activations-checkpoint-granularity": "--recompute-granularity",
    "--activations-checkpoint-method": "--recompute-method",
    "--activations-checkpoint-num-layers": "--recompute-num-layers",
    "--checkpoint-num-layers": "--recompute-num-layers",
    "--distribute-checkpointed-activations": "--distribute-saved-activations",
    "--fp8-e4m3": "--fp8-format e4m3",
    "--fp8-hybrid": "--fp8-format hybrid",
    "--moe-expert-model-parallel-size": "--expert-model-parallel-size",
    "--moe-num-experts": "--num-experts",
    "--use-flash-attn-v2": "--use-flash-attn",
}
# Least likeness (difflib's ratio) with which an unknown flag is taken for a misspelt flag of
# Megatron.
SURELY_MEANT = 0.9


@dataclass(frozen=True)
class WordFinding:
    """Judgement of words of a launch command.

    They are right, perhaps right ("remark"), or a mistake ("wrong"). ``fix`` says what to do about
    the words; "" if nothing has to be done.
    """

    verdict: Literal["right", "remark", "wrong"]
    text: str
    fix: str = ""


def unknown_words(
    argv: Sequence[str], unknown: Sequence[str], flags: Sequence[str], texts: ScriptTexts | None
) -> Iterator[WordFinding]:
    """Yield a finding on the ``unknown`` words of ``argv``, given the known ``flags``.

    A flag that had another name in older versions of Megatron, or is nearly a flag of Megatron's or
    of ours, is a mistake. Any other unknown flag may be the script's own.

    Args:
        texts: source of the script and its modules; None if it cannot be read.
    """
    knows_all = texts is None or texts.finds_all
    of_script: list[str] = []
    others: list[str] = []
    for word in unknown:
        name = word.split("=")[0]
        if word.lstrip().startswith("--") and (len(name.split()) > 1 or " --" in word.lstrip()):
            text = f"{name.split()[0]} and what follows it are one word, which is no flag"
            fix = 'a shell splits $ARGS at its blanks, and "$ARGS" not: drop the quotes around it'
            yield WordFinding("wrong", text, fix)
        elif not name.startswith("--"):
            before = [argv[i - 1] for i in range(1, len(argv)) if argv[i] == word]
            if not any(other in unknown for other in before):
                text = f"{word!r} belongs to no flag"
                fix = _quoted(argv, word) or "drop it: the flag before it takes no value"
                yield WordFinding("wrong", text, fix)
        elif texts is not None and _adds(texts.text, name):
            of_script.append(name)
        elif name in RENAMED:
            fix = f"write {RENAMED[name]}"
            yield WordFinding("wrong", f"Megatron {_version()} has no flag {name}", fix)
        elif knows_all and (meant := _surely_meant(name, flags)) is not None:
            yield WordFinding("wrong", f"there is no flag {name}", meant)
        else:
            others.append(name)
    of_script, others = list(dict.fromkeys(of_script)), list(dict.fromkeys(others))
    if of_script:
        verb = "are" if len(of_script) > 1 else "is"
        yield WordFinding("right", f"{', '.join(of_script)} {verb} the script's own")
    if others:
        text = f"Megatron {_version()} has no flag {', '.join(others)}"
        it = "them" if len(others) > 1 else "it"
        fix = f"drop {it}, unless the script adds {it}: Megatron would refuse {it}"
        yield WordFinding("remark", text, "; ".join([*_perhaps_meant(others, flags), fix]))


def _quoted(argv: Sequence[str], word: str) -> str:
    """Return a fix for a ``word`` that follows a flag's complete value; "" for any other word.

    The user may have forgotten quotes: a shell splits a value at its spaces.
    """
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


def _adds(text: str, name: str) -> bool:
    """Return whether the text of a script has the flag ``name`` as a word."""
    return re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text) is not None


def _surely_meant(name: str, flags: Sequence[str]) -> str | None:
    """Return which flag is meant if ``name`` is surely a misspelling; None if it is not.

    "" if it is a misspelling, but of which flag is not clear.
    """
    ours = meant_by(name, (flag(setting.name) for setting in fields(PipelineConfig)))
    close = difflib.get_close_matches(name.replace("_", "-"), flags, cutoff=SURELY_MEANT)
    if not (ours or name.startswith(flag("")) or any(not is_opposite(name, f) for f in close)):
        return None
    meant = " or ".join(meant_by(name, flags) or ours)
    return f"did you mean {meant}?" if meant else ""


def _perhaps_meant(names: Sequence[str], flags: Sequence[str]) -> Iterator[str]:
    """Yield the flags that the unknown ``names`` may stand for."""
    for name in names:
        meant = [other for other in meant_by(name, flags) if has_similar_words(name, other)]
        if meant:
            yield f"did you mean {' or '.join(meant)} by {name}?"


def _version() -> str:
    """Return the version of the Megatron that parsed the words."""
    from megatron.core import __version__

    return str(__version__).partition("+")[0]
