"""Size of a problem, and the time and memory to build its program, known before building begins.

A typing error such as a million microbatches would fill the memory of a machine for minutes before
it fails. The size is therefore estimated from stages and microbatches alone, and refused if it does
not fit.
"""

from __future__ import annotations

import os

from megatron_ext.base.progress import duration
from megatron_ext.base.words import bytes_text, counted
from megatron_ext.schedule.problem import Problem, VocabularyParallel
from megatron_ext.schedule.schedule_csv import KINDS_IN_FILES

_WORTH_A_WORD = 500_000  # number of passes from which building a program is announced in the log
# Seconds and bytes to build, prove and simulate one microbatch on one stage (about eight actions,
# with messages and waits), measured for 1f1b, interleaved, zb-h1 and zb-v on 8 to 128 ranks. The
# seconds grow with the ranks, since the progress of every rank is computed for each pass (`waits`).
_SECONDS, _SECONDS_PER_RANK = 60e-6, 0.1e-6
_BYTES = 3500


def problem_size(problem: Problem) -> str:
    """Return the size of ``problem`` in words, such as ``8 ranks and 32 microbatches``.

    For a very large problem the text includes the time and memory to build its program.
    """
    text = _counts(problem)
    if problem.options.vocab_parallel is not VocabularyParallel.NONE:
        text += f", vocabulary parallelism {problem.options.vocab_parallel}"
    # Three passes for each microbatch and stage: F, I and W.
    passes = 3 * _stage_microbatches(problem)
    if passes < _WORTH_A_WORD:
        return text
    takes = (
        f"{duration(seconds_to_build(problem))} and {bytes_text(bytes_to_build(problem))} of memory"
    )
    return f"{text} ({passes:,} passes: they take about {takes})"


def check_size(problem: Problem) -> None:
    """Raise ValueError if building the program of ``problem`` takes more memory than this machine
    has."""
    _check_memory(bytes_to_build(problem), f"a schedule for {_counts(problem)}")


def check_table(text: str, what: str) -> None:
    """Raise ValueError if the program of a schedule table takes more memory than this machine has.

    ``text`` is the content of the file that errors call ``what``. Its actions are counted by their
    letters, before any of them is parsed.
    """
    letters = text.replace("OVERLAP_F_B", "")
    most = max(letters.count(kind) for kind in KINDS_IN_FILES)
    _check_memory(most * _BYTES, f"the schedule in {what} (about {most:,} passes of a kind)")


def _check_memory(takes: int, what: str) -> None:
    has = _machine_bytes()
    if takes > has:
        raise ValueError(
            f"building {what} takes about {bytes_text(takes)} of memory, and this machine has "
            f"{bytes_text(has)}: write fewer microbatches or ranks"
        )


def seconds_to_build(problem: Problem) -> float:
    """Estimate the seconds to build, prove and simulate a program for ``problem`` without a
    search."""
    return _stage_microbatches(problem) * (_SECONDS + _SECONDS_PER_RANK * problem.ranks)


def bytes_to_build(problem: Problem) -> int:
    """Estimate the bytes of memory to build and simulate a program for ``problem``."""
    return _stage_microbatches(problem) * _BYTES


def _counts(problem: Problem) -> str:
    text = f"{counted(problem.ranks, 'rank')} and {counted(problem.microbatches, 'microbatch')}"
    return text if problem.slices.count == 1 else f"{text} of {problem.slices.count} slices"


def _stage_microbatches(problem: Problem) -> int:
    """Return the number of stages times the number of microbatches (or of their slices)."""
    return problem.placement.stages * problem.pieces


def _machine_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
