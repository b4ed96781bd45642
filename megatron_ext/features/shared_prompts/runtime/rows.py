"""Rows of a microbatch in which sequences with the same prompt share its tokens.

A prompt without its last token is the prefix of its group. In the row the prefix comes once, and
behind the prefix the rest of each of the group's sequences, which begins with the prompt's last
token: the label of that token is the first token of an answer.

    sequences  |pppp aaa|pppp bb|pppp cccc|      their row  |ppp|p aaa|p bb|p cccc|

A segment of the row, prefix or rest, attends to its prefix and to itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """Segment of a packed row: the tokens ``begin`` to ``end`` (exclusive).

    Attributes:
        parent: number of the segment (a prompt's prefix) that this one continues; None if it begins
            a sequence.
    """

    begin: int
    end: int
    parent: int | None = None

    @property
    def length(self) -> int:
        """Number of tokens of this segment."""
        return self.end - self.begin


@dataclass(frozen=True)
class SharedRow:
    """Packed row of one microbatch in which sequences with the same prompt share its tokens.

    Attributes:
        segments: consecutive segments, each after its parent.
        sources: for each token of the row, the first equal token among the concatenated sequences.
        places: for each token of the concatenated sequences, its token of the row.
    """

    segments: tuple[Segment, ...]
    sources: tuple[int, ...]
    places: tuple[int, ...]

    @property
    def positions(self) -> list[int]:
        """Position of each token of the row in its own sequence."""
        return [
            position
            for segment in self.segments
            for position in range(self._before(segment), self._before(segment) + segment.length)
        ]

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sequence, with its prompt."""
        return max(self._before(segment) + segment.length for segment in self.segments)

    def attended(self, segment: Segment) -> list[int]:
        """Return the tokens of the row that the last token of ``segment`` attends to."""
        itself = range(segment.begin, segment.end)
        if segment.parent is None:
            return [*itself]
        parent = self.segments[segment.parent]
        return [*range(parent.begin, parent.end), *itself]

    def _before(self, segment: Segment) -> int:
        return 0 if segment.parent is None else self.segments[segment.parent].length


def shared_row(
    lengths: Sequence[int], prompts: Sequence[int], groups: Sequence[Hashable], multiple: int = 1
) -> SharedRow:
    """Return the packed row of sequences that share prompts.

    ``lengths`` are the sequences' tokens; the first ``prompts`` tokens of a sequence are common to
    all sequences of its group. Padding to a ``multiple`` of tokens is in separate segments at the
    end, which are copies of the first token, none longer than the longest sequence.

    Raises:
        ValueError: a prompt is not within its sequence, a group has prompts of several lengths, or
            ``multiple`` is less than 1.
    """
    _check(lengths, prompts, groups)
    if multiple < 1:
        raise ValueError(f"share_prompts: multiple is {multiple}: give a number of at least 1")
    begins = [0, *itertools.accumulate(lengths)]
    members: dict[Hashable, list[int]] = {}
    for number, group in enumerate(groups):
        members.setdefault(group, []).append(number)
    segments: list[Segment] = []
    sources: list[int] = []
    places = [0] * begins[-1]

    def add(begin: int, end: int, parent: int | None = None) -> None:
        segments.append(Segment(len(sources), len(sources) + end - begin, parent))
        sources.extend(range(begin, end))

    for sequences in members.values():
        first = sequences[0]
        prefix = prompts[first] - 1 if len(sequences) > 1 else 0
        at, parent = len(sources), None
        if prefix:
            parent = len(segments)
            add(begins[first], begins[first] + prefix)
        for number in sequences:
            begin, end = begins[number], begins[number + 1]
            places[begin : begin + prefix] = range(at, at + prefix)
            places[begin + prefix : end] = range(len(sources), len(sources) + end - begin - prefix)
            add(begin + prefix, end, parent)
    missing = -len(sources) % multiple
    while missing:
        padding = min(missing, max(lengths))
        segments.append(Segment(len(sources), len(sources) + padding))
        sources.extend([0] * padding)
        missing -= padding
    return SharedRow(tuple(segments), tuple(sources), tuple(places))


def _check(lengths: Sequence[int], prompts: Sequence[int], groups: Sequence[Hashable]) -> None:
    if not len(lengths) == len(prompts) == len(groups) > 0:
        raise ValueError(
            f"share_prompts: {len(lengths)} lengths, {len(prompts)} prompts and {len(groups)} "
            f"groups are given: give one of each for every sequence of the microbatch"
        )
    if not all(isinstance(group, Hashable) for group in groups):
        raise ValueError(
            f"share_prompts: groups are {groups!r}, which cannot be keys of a dictionary: give "
            "each sequence the number or the name of its prompt"
        )
    of_group: dict[Hashable, int] = {}
    for number, (length, prompt, group) in enumerate(zip(lengths, prompts, groups, strict=True)):
        if not 1 <= prompt <= length:
            raise ValueError(
                f"share_prompts: sequence {number} has {length} tokens and a prompt of {prompt}: "
                f"give prompts of at least one token, which are part of their sequence"
            )
        if of_group.setdefault(group, prompt) != prompt:
            raise ValueError(
                f"share_prompts: sequence {number} of group {group!r} has a prompt of {prompt} "
                f"tokens, and an earlier sequence of the group has one of {of_group[group]}: all "
                "sequences of a group have the same prompt"
            )
