"""Public measurements of trainings on clusters, as measured.csv has them: one step a row.

A row has the sizes of a training, its layout and schedule, the published seconds of a step or OOM,
the published peak of the fullest rank if there is one, and where both were read. Rows whose job
begins with ``passes`` have milliseconds of passes in their place (`stage_times`).
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from megatron_ext.cost_model.model import Model

MEASURED = Path(__file__).with_name("measured.csv")
PASSES = "passes, "  # beginning of a row's job if the row measures passes without a step
GB = 2**30  # bytes of a GB: torch.cuda's bytes are divided by it in the sources


@dataclass(frozen=True)
class PublishedStep:
    """Measured step of a training that others have published.

    Attributes:
        number: the row's id.
        job: what was trained where. Rows of one job differ only in layout or schedule.
        cells: all columns as text, for settings that only some rows have.
        layers: layers of each stage; () if the row does not tell.
        seconds: seconds of a step; infinite if it ran out of memory.
        peak: bytes of the fullest rank; None if none are published.
        in_view: whether its measured time was known when a constant of the estimate was chosen.
    """

    number: int
    job: str
    source: str
    framework: str
    gpu: str
    gpus: int
    pipeline: int
    chunks: int
    microbatches: int
    schedule: str
    layers: tuple[int, ...]
    seconds: float
    peak: float | None
    in_view: bool
    cells: Mapping[str, str] = field(repr=False, hash=False, compare=False)

    @property
    def ran(self) -> bool:
        """Whether the step did not run out of memory."""
        return self.seconds < inf

    def size(self, column: str) -> int:
        """Return the whole number in ``column`` of the row; 0 if the cell is empty."""
        return int(self.cells[column].split()[0]) if self.cells[column] else 0


def dense_model(step: PublishedStep, **more: Any) -> Model:
    """Return the model of equal layers that the columns of ``step`` describe.

    It has as many query groups as heads, and its embedding and output layer share no weights.
    ``more`` are further fields of the model.
    """
    size = step.size
    return Model(
        layers=("*-",) * size("layers"),
        hidden_size=size("hidden"),  # plain words: a column of the measurements
        num_attention_heads=size("heads"),
        num_query_groups=size("heads"),
        kv_channels=size("hidden") // size("heads"),  # plain words: a column
        ffn_hidden_size=size("ffn"),
        vocabulary=size("vocab"),
        untie_embeddings_and_output_weights=True,
        **more,
    )


_NEEDED = (
    *("id", "job", "source", "where_read", "framework", "gpu", "n_gpus", "pp", "vpp", "m"),
    *("schedule", "layout", "seconds", "peak_gb", "tp", "cp", "ep", "dp", "mbs", "gbs", "seq"),
    *("precision", "in_view", "note"),
)


def read_measured(path: Path = MEASURED) -> list[PublishedStep]:
    """Return the steps of the CSV file ``path``.

    Raises:
        ValueError: a column is missing, or a cell is not understood. The message names the file and
            the line.
    """
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in _NEEDED if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{path} has no column {', '.join(missing)}")
        steps = []
        for row in reader:
            if row["job"].startswith(PASSES):
                continue
            try:
                steps.append(_step(row))
            except ValueError as error:
                raise ValueError(f"{path}, line {reader.line_num}: {error}") from None
    numbers = [step.number for step in steps]
    twice = sorted({number for number in numbers if numbers.count(number) > 1})
    if twice:
        raise ValueError(f"{path} has the id {twice[0]} twice")
    return steps


def _step(row: Mapping[str, str]) -> PublishedStep:
    """Return the step of a row. Raises ValueError if a cell is not understood."""

    def number(name: str) -> int:
        text = row[name] or ""
        if not text.isdecimal() or not int(text):
            raise ValueError(f"{name} is {text!r}: write a whole number from 1 on")
        return int(text)

    def amount(name: str) -> float:
        try:
            found = float(row[name])
        except ValueError:
            found = -1.0
        if not 0 < found < inf:
            raise ValueError(f"{name} is {row[name]!r}: write a number above 0")
        return found

    for name in ("job", "source", "where_read", "schedule"):
        if not row[name]:
            raise ValueError(f"{name} is empty")
    pipeline, chunks = number("pp"), number("vpp")
    layers = _layers(row["layout"], pipeline * chunks)
    return PublishedStep(
        number("id"),
        row["job"],
        row["source"],
        row["framework"],
        row["gpu"],
        number("n_gpus"),
        pipeline,
        chunks,
        number("m"),
        row["schedule"],
        layers,
        inf if row["seconds"] == "OOM" else amount("seconds"),
        amount("peak_gb") * GB if row["peak_gb"] else None,
        row["in_view"] == "1",
        dict(row),
    )


def _layers(text: str, stages: int) -> tuple[int, ...]:
    """Return the numbers of layers in ``text``, ``2,3,3,2``; () for other forms of a layout.

    Raises:
        ValueError: there are not as many numbers as ``stages``.
    """
    words = text.split(",")
    if len(words) < 2 or not all(word.isdecimal() for word in words):
        return ()
    if len(words) != stages:
        raise ValueError(f"the layout has {len(words)} stages, and the pipeline has {stages}")
    return tuple(map(int, words))
