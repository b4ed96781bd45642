"""How a plan's verdict would change if the vocabulary had another size than the assumed one.

The size comes from the tokenizer, whose files may not be on the machine that plans. The output
layer's time depends on it, and so may the best schedule: the user is told how the gain changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from megatron_ext.base.words import bytes_text
from megatron_ext.launch.planner.parsed_launch import ASSUMED_TOKENS, USUAL_TOKENS, ParsedLaunch
from megatron_ext.planner.planning_time import provisional, until_end
from megatron_ext.planner.verdict import Alternative, Verdict

JudgedWith = Callable[[ParsedLaunch, Alternative], Alternative]


def on_assumed_vocabulary(parsed: ParsedLaunch, found: Verdict, judged: JudgedWith) -> str:
    """Return a remark that the vocabulary's size was assumed, with the gain at other sizes.

    Args:
        found: the verdict with the assumed size.
        judged: returns an alternative with time and memory of the launch that is changed to it.
            Raises ValueError if that could not start.
    """
    text = f"a vocabulary of {ASSUMED_TOKENS:,} tokens, since its tokenizer is not here"
    if found.baseline is not None and found.taken is not None and not found.keeps:
        others = list(_with_others(parsed, found, judged))
        text += f"; the same flags {', '.join(others)}" if others else ""
    return f"{text}: add --padded-vocab-size N"


def _with_others(parsed: ParsedLaunch, found: Verdict, judged: JudgedWith) -> Iterator[str]:
    for tokens in USUAL_TOKENS:
        other = replace(parsed, variants=replace(parsed.variants, tokens=tokens))
        with provisional():
            words = until_end(partial(_in_words, other, found, judged), "")
        if words:
            yield f"{words} with {tokens:,}"


def _in_words(parsed: ParsedLaunch, found: Verdict, judged: JudgedWith) -> str:
    baseline, taken, stock = found.baseline, found.taken, found.stock
    assert baseline is not None and taken is not None
    now = judged(parsed, baseline).seconds
    try:
        made = judged(parsed, taken)
    except ValueError:
        return "are refused"
    fullest, allowed = made.candidate.fullest, parsed.allowed_bytes
    if fullest is not None and allowed is not None and fullest > allowed:
        return f"take {bytes_text(fullest - allowed)} too much"
    saved = 1 - made.seconds / now
    text = f"save {saved:.1%}" if saved >= 0 else f"lose {-saved:.1%}"
    if stock is None or stock is taken:
        return text
    of_stock = 1 - judged(parsed, stock).seconds / now
    return f"{text} (Megatron's own {of_stock:.1%})" if of_stock > saved else text
