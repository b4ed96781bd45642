"""Text that a shell runs, such as the word behind ``bash -c``, split into commands.

Each word keeps its place in the text, so that a launch command in it can be changed while the shell
still sees the rest as it was written: variables, pipes, redirections and other commands. Nothing is
expanded. Here-documents are not understood.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_BLANKS = " \t"
_SEPARATORS = ";&|()\n"
_CONTINUATION = "\\\n"  # a line that goes on in the next one
_REDIRECTION = re.compile(r"&>>?|<<<|<&|<>|>>|>&|>\||[<>](?!\()")
_COMMENT = re.compile(r"#[^\n]*")
_PLAIN = re.compile(r"[^\s\\'\"`$;&|()<>]+|.", re.DOTALL)
_ESCAPED = re.compile(r'\\([\\"$`\n])')  # characters that a backslash escapes in double quotes
_CLOSING = {"(": ")", "{": "}"}


@dataclass(frozen=True)
class ShellWord:
    """Word of a command in a shell's text: without its quotes, and its place in the text."""

    text: str
    begin: int
    end: int


def shell_commands(text: str) -> list[tuple[ShellWord, ...]]:
    """Return the commands in a shell's ``text``, without redirections and comments.

    Raises:
        ValueError: a quote or a bracket is not closed.
    """
    commands: list[list[ShellWord]] = [[]]
    word: str | None = None  # the word that is being read
    begin = at = 0
    is_target = False  # whether the next word belongs to a redirection

    def end_word() -> None:
        nonlocal word, is_target
        if word is not None and not is_target:
            commands[-1].append(ShellWord(word, begin, at))
        is_target = is_target and word is None
        word = None

    while at < len(text):
        if text.startswith(_CONTINUATION, at):
            at += len(_CONTINUATION)
        elif text[at] in _BLANKS:
            end_word()
            at += 1
        elif word is None and (found := _COMMENT.match(text, at)):
            at = found.end()
        elif found := _REDIRECTION.match(text, at):
            if text[begin:at].isdecimal() and text[at] != "&":
                word = None  # the word was the number of a file, as in 2>&1
            end_word()
            is_target, at = True, found.end()
        elif text[at] in _SEPARATORS:
            end_word()
            is_target = False
            commands.append([])
            at += 1
        else:
            if word is None:
                word, begin = "", at
            part, at = _part(text, at)
            word += part
    end_word()
    return [tuple(command) for command in commands if command]


def _part(text: str, at: int) -> tuple[str, int]:
    """Return a part of a word that begins ``at`` an index of ``text``, and the index behind it."""
    first, following = text[at], text[at + 1 : at + 2]
    if first == "\\":
        return following, at + 2
    if first == "'":
        end = _index(text, "'", at + 1)
        return text[at + 1 : end], end + 1
    if first == '"':
        end = _end_of_quote(text, at)
        return _ESCAPED.sub(_unescaped, text[at + 1 : end - 1]), end
    if first == "`" or (first in "$<>" and following in _CLOSING):
        end = _end_of_expansion(text, at)
        return text[at:end], end
    found = _PLAIN.match(text, at)
    assert found is not None
    return found[0], found.end()


def _unescaped(found: re.Match[str]) -> str:
    return "" if found[1] == "\n" else found[1]


def _end_of_quote(text: str, at: int) -> int:
    """Return the index behind the double quotes that begin ``at`` an index of ``text``."""
    place = at + 1
    while text[place : place + 1] != '"':
        if place >= len(text):
            raise ValueError('a quote " is not closed')
        if text[place] == "\\":
            place += 2
        elif text[place] == "`" or (text[place] == "$" and text[place + 1 : place + 2] in _CLOSING):
            place = _end_of_expansion(text, place)
        else:
            place += 1
    return place + 1


def _end_of_expansion(text: str, at: int) -> int:
    """Return the index behind the expansion that begins ``at`` an index of ``text``.

    It is ``$(...)``, ``${...}``, a command in backquotes, or ``>(...)``.
    """
    if text[at] == "`":
        return _index(text, "`", at + 1) + 1
    opening, place, depth = text[at + 1], at + 1, 0
    while place < len(text):
        letter = text[place]
        if letter == "'":
            place = _index(text, "'", place + 1) + 1
        elif letter == '"':
            place = _end_of_quote(text, place)
        else:
            depth += (letter == opening) - (letter == _CLOSING[opening])
            place += 2 if letter == "\\" else 1
        if depth == 0:
            return place
    raise ValueError(f"a bracket {opening} is not closed")


def _index(text: str, letter: str, start: int) -> int:
    if (place := text.find(letter, start)) < 0:
        raise ValueError(f"a quote {letter} is not closed")
    return place
