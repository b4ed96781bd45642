"""Commands and arguments to be shown or stored, without the secrets in them.

A secret is the value of an assignment or a flag whose name ends in KEY, TOKEN, SECRET or PASSWORD.
The variable of that name stands in its place, so that a command can still be pasted:
``WANDB_API_KEY=$WANDB_API_KEY``, ``--hf-token $HF_TOKEN``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

_NAME = r"(?<![\w./-])((?:--?)?[A-Za-z_][\w.-]*?(?:key|token|secret|password))(?![\w.-])"
_VALUE = r"(?:\"[^\"]*\"|'[^']*'|[^\s,;&|\"'()]*)"
_WORD = re.compile(f"{_NAME}(=.*)?", re.IGNORECASE | re.DOTALL)
# Pattern of a secret that is written as key=value within a word, as in a list or in an address.
_INSIDE = re.compile(f"{_NAME}(=){_VALUE}", re.IGNORECASE)
# Pattern of secrets within a shell command, where a flag and its value are parts of one word.
_IN_SHELL = re.compile(rf"{_NAME}(=|\s+(?!-)){_VALUE}", re.IGNORECASE)
# Pattern of flags whose tokens are no secrets (such as --eos-token), since a tokenizer puts these
# tokens into texts.
_OF_TEXTS = re.compile(
    r"[-_.](?:bos|eos|eod|pad|unk|sep|cls|mask|prefix|middle|suffix|image)[-_]token$",
    re.IGNORECASE,
)
# Pattern of a short option with its value in the same word, as docker's -eNAME=value.
_SHORT = re.compile(r"-[a-z](?=[A-Z_])")
_SHELL_FLAG = re.compile(r"-[a-z]*c")  # -c and -lc, behind which a shell finds its text
# Character that stands for a dollar sign which a shell is to expand; no word of a command has this
# character.
_DOLLAR = "\0"


def masked(words: Sequence[str]) -> str:
    """Return the words of a command, without secrets, as one line for a shell.

    They are quoted as by `shlex.join`.
    """
    texts: list[str] = []
    secret_flag = before = ""
    for word in words:
        if secret_flag and not word.startswith("-"):
            texts.append(f"${_variable(secret_flag)}")
            secret_flag = ""
        elif is_shell_flag(before):  # the shell expands variables in this word
            texts.append(shlex.quote(_IN_SHELL.sub(_mask, word).replace(_DOLLAR, "$")))
        else:
            texts.append(_in_quotes(_masked_word(word)))
            secret_flag = word if _is_secret(word) and word.startswith("-") else ""
        before = word
    return " ".join(texts)


def is_shell_flag(word: str) -> bool:
    """Return whether ``word`` may be a shell's flag before a text to run, such as ``-lc``."""
    return _SHELL_FLAG.fullmatch(word) is not None


def without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return Megatron's arguments by name, with the name of a variable in place of each secret."""
    return {
        name: f"${_variable(f'--{name}')}"
        if isinstance(value, str) and _is_secret(f"--{name}")
        else value
        for name, value in values.items()
    }


def _is_secret(name: str) -> bool:
    """Return whether ``name``, a flag with its dashes or a variable, names a secret."""
    found = _WORD.fullmatch(name)
    return found is not None and found[2] is None and not _is_of_texts(name)


def _is_of_texts(name: str) -> bool:
    return name.startswith("-") and _OF_TEXTS.search(name) is not None


def _variable(name: str) -> str:
    """Return the variable that replaces the secret of an assignment or a flag ``name``."""
    plain = re.sub(r"\W", "_", _SHORT.sub("", name).lstrip("-"))
    return plain.upper() if name.startswith("-") else plain


def _masked_word(word: str) -> str:
    found = _WORD.fullmatch(word)
    if found is None:
        return _INSIDE.sub(_mask, word)
    if found[2] is None or _is_of_texts(found[1]):
        return word
    return f"{found[1]}={_DOLLAR}{_variable(found[1])}"


def _mask(found: re.Match[str]) -> str:
    name, between = found[1], found[2]
    if _is_of_texts(name) or (between != "=" and not name.startswith("-")):
        return found[0]
    return f"{name}{between}{_DOLLAR}{_variable(name)}"


def _in_quotes(word: str) -> str:
    """Return ``word`` quoted for a shell, which still expands variables marked by `_DOLLAR`."""
    plain = word.replace(_DOLLAR, "")
    quoted = shlex.quote(plain)
    if plain == word:
        return quoted
    if plain != quoted:
        word = '"' + re.sub(r'([\\`"$])', r"\\\1", word) + '"'
    return word.replace(_DOLLAR, "$")
