"""Text form of unequal microbatches of several steps, and the times of their passes.

The time of a pass is proportional to the tokens of its microbatch, except attention, which is
proportional to the sum of its documents' squared lengths, as attention stays inside documents.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_ext.base.text_file import read_lines
from megatron_ext.base.words import bytes_text, counted, shown
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.action_arrays import IS_PASS, KINDS, Floats
from megatron_ext.schedule.costs import Costs

PASSES = tuple(kind for kind, is_pass in zip(KINDS, IS_PASS, strict=True) if is_pass)
DRAWN_STEPS = 20
_LOGNORMAL = "lognormal:"
_A_LINE = "a line per microbatch, with the lengths of its documents or its cost"
_LARGEST, _LONGEST = 2**25, 2**20  # largest file in bytes, and longest line in characters
_MOST = 1e100  # largest cost; the sums of squares of such costs are still finite
_EXAMPLE = f"write lognormal:0.5, or the path of a file with {_A_LINE}"


@dataclass(frozen=True)
class BatchSize:
    """Size of the batch of a training step.

    Attributes:
        microbatches: number of microbatches on each data-parallel replica.
        replicas: number of data-parallel replicas.
        samples: number of sequences in a microbatch.
        sequence: tokens of each sequence; None if not known.
        is_padded: whether all microbatches have ``samples`` x ``sequence`` tokens, whatever the
            documents in them.
        expert_replicas: number of replicas that share experts.
    """

    microbatches: int
    replicas: int = 1
    samples: int = 1
    sequence: int | None = None
    is_padded: bool = False
    expert_replicas: int = 1


@dataclass(frozen=True)
class MicrobatchLoads:
    """Relative costs of the microbatches of several steps: each array has a row per step.

    Attributes:
        tokens: tokens of a microbatch divided by those of the microbatch that costs are made for.
        squares: the sum of the squared document lengths divided by that of the microbatch that
            costs are made for.
        unshared: loads of the same microbatches if each prompt is computed for each of its answers;
            None if no answers share a prompt, or microbatches are padded.
    """

    tokens: Floats
    squares: Floats
    unshared: MicrobatchLoads | None = None

    def costs(self, costs: Costs) -> Mapping[Kind, Floats]:
        """Return factors on the seconds in ``costs`` for each microbatch, by kind of pass.

        Each array of factors has a row per step.
        """

        def total(kind: Kind) -> float:
            return sum(costs.seconds[kind])

        def factors(kind: Kind) -> Floats:
            attention = sum(costs.of_attention(kind, stage) for stage in range(costs.stages))
            share = attention / (total(kind) or 1.0)
            return (1 - share) * self.tokens + share * self.squares

        kinds = Kind.FORWARD, Kind.BACKWARD_INPUT
        made = dict.fromkeys(PASSES, self.tokens) | {kind: factors(kind) for kind in kinds}
        of_inputs, of_weights = total(Kind.BACKWARD_INPUT), total(Kind.BACKWARD_WEIGHT)
        backward = of_inputs * made[Kind.BACKWARD_INPUT] + of_weights * self.tokens
        made[Kind.FULL_BACKWARD] = backward / ((of_inputs + of_weights) or 1.0)
        made[Kind.RECOMPUTE] = made[Kind.FORWARD]
        return made


def parse_microbatch_costs(text: str, per_step: int) -> MicrobatchLoads:
    """Return relative costs of microbatches, from a file or drawn at random.

    The costs in a file are scaled to mean 1, random ones have a mean of about 1. There are
    ``per_step`` microbatches in a step.

    Args:
        text: ``lognormal:0.5`` draws 20 steps of microbatches with one document each, whose tokens
            have this standard deviation as a share of their mean; else the path of a file as in
            `read_loads`.

    Raises:
        ValueError: ``text`` is neither, or the file is at fault.
    """
    if text.startswith(_LOGNORMAL):
        tokens = _drawn(text, per_step)
        return MicrobatchLoads(tokens, tokens**2 / (tokens**2).mean())
    return read_loads(Path(text), BatchSize(per_step))


def read_loads(file: Path, batch: BatchSize) -> MicrobatchLoads:
    """Return the relative costs of the microbatches in ``file``, which has a line per microbatch.

    A line has the lengths of the microbatch's documents in tokens, between spaces or commas, or one
    figure that tells its cost. A prompt that several answers share is computed once, and is written
    as PROMPT+ANSWER+ANSWER. Lines behind the last whole step are ignored. The costs are relative to
    a microbatch of ``batch`` with one document in each sequence, or to their mean if the length of
    a sequence is not known.

    Raises:
        ValueError: there is no such file, a length is no positive number, there are fewer lines
            than one step has, or more tokens in a line than a microbatch of ``batch``.
    """
    per_step = batch.microbatches * batch.replicas
    sums = array("d")  # for each microbatch the sums of its lengths and of their squares
    unshared_sums = array("d")  # the same sums with each prompt computed for each of its answers
    is_padded = batch.sequence is not None and batch.is_padded
    is_shared = False  # whether several answers share a prompt
    for number, row in _rows(file):
        if batch.sequence is not None and is_padded:
            row = _padded(file, number, row, batch.samples * batch.sequence)
        sums.extend((sum(map(sum, row)), sum(map(_squares, row))))
        is_shared = is_shared or any(len(document) > 2 for document in row)
        sequences = [one for document in row for one in _sequences(document)]
        unshared_sums.extend((sum(sequences), sum(length * length for length in sequences)))
    count = len(sums) // 2
    if count < per_step:
        raise ValueError(
            f"{file} has {counted(count, 'microbatch')}, and a step of all replicas has "
            f"{counted(per_step, 'microbatch')}: give at least {per_step} lines"
        )

    def by_step(of_microbatches: array[float]) -> Floats:
        whole_steps = np.array(of_microbatches).reshape(-1, 2)[: count // per_step * per_step]
        return whole_steps.T.reshape(2, -1, per_step)

    tokens, squares = by_step(sums)
    if batch.sequence is None:
        full, squared = tokens.mean(), squares.mean()
    else:
        full = batch.samples * batch.sequence
        squared = full * batch.sequence
    unshared = None
    if is_shared and not is_padded:
        of_all, squares_of_all = by_step(unshared_sums)
        unshared = MicrobatchLoads(of_all / full, squares_of_all / squared)
    return MicrobatchLoads(tokens / full, squares / squared, unshared)


def lognormal(rng: np.random.Generator, deviation: float, size: tuple[int, int]) -> Floats:
    """Return lognormal random numbers of mean 1 whose standard deviation is ``deviation``."""
    variance = math.log1p(deviation**2)
    return np.exp(rng.standard_normal(size) * math.sqrt(variance) - variance / 2)


def _drawn(text: str, per_step: int) -> Floats:
    figure = text.removeprefix(_LOGNORMAL)
    try:
        deviation = float(figure)
    except ValueError:
        deviation = math.nan
    if not 0 <= deviation <= 10:
        raise ValueError(
            f"microbatch costs {shown(text)!r}: {shown(figure)!r} is no number from 0 to 10; "
            f"{_EXAMPLE}"
        )
    return lognormal(np.random.default_rng(0), deviation, (DRAWN_STEPS, per_step))


# Length of a document, or of a prompt together with the lengths of its answers (PROMPT+ANSWER).
_Document = tuple[float, ...]


def _squares(document: _Document) -> float:
    """Return twice the number of pairs of tokens of a ``document`` that attend to one another.

    A document with several parts is a prompt with its answers.
    """
    prompt, *answers = document
    return prompt * prompt + sum(answer * (2 * prompt + answer) for answer in answers)


def _sequences(document: _Document) -> list[float]:
    """Return the lengths of the sequences of ``document``, with its prompt in each of them."""
    prompt, *answers = document
    return [prompt + answer for answer in answers] or [prompt]


def _rows(file: Path) -> Iterator[tuple[int, list[_Document]]]:
    """Yield the number and the documents of each line of ``file`` that is not empty."""
    if not file.is_file():
        raise ValueError(f"microbatch costs {shown(str(file))!r} name no file; {_EXAMPLE}")
    if (size := file.stat().st_size) > _LARGEST:
        raise ValueError(
            f"microbatch costs {shown(str(file))} have {bytes_text(size)}, and at most "
            f"{bytes_text(_LARGEST)} are read: give the lines of fewer steps"
        )
    lines = read_lines(file, "microbatch costs", _LONGEST)
    for number, line in enumerate(lines, 1):
        if words := re.findall(r"[^\s,]+", line):
            yield (
                number,
                [
                    tuple(_positive(file, number, part) for part in word.split("+"))
                    for word in words
                ],
            )


def _positive(file: Path, line: int, word: str) -> float:
    try:
        figure = float(word)
    except ValueError:
        figure = math.nan
    if not 0 < figure < _MOST:
        raise ValueError(
            f"{file}, line {line}: {shown(word)!r} is no positive number below {_MOST:g}; give "
            f"{_A_LINE}"
        )
    return figure


def _padded(file: Path, line: int, documents: list[_Document], tokens: int) -> list[_Document]:
    """Return the documents of a microbatch with the padding that fills it up to ``tokens``.

    The padding is added to the last document, or to its last answer.
    """
    length = sum(map(sum, documents))
    if length > tokens:
        raise ValueError(
            f"{file}, line {line}: {length:g} tokens are too many, as a microbatch of this launch "
            f"has {tokens}"
        )
    *others, (*parts, last) = documents
    return [*others, (*parts, last + tokens - length)]
