"""Options that several commands have. Each is declared once, so that its help and its type are the
same in all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_ext.commands.schedule_options import declared_option
from megatron_ext.cost_model.gpus import USABLE

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON: one object or list.")]
SpecArgument = Annotated[
    str,
    typer.Argument(
        metavar="SPEC",
        help="Schedule: a name that 'megatron-ext schedules' lists, NAME[:key=value,...], auto, or "
        "a .csv or .py file.",
    ),
]
Ranks = Annotated[int, typer.Option(help="Number of pipeline ranks.")]
Microbatches = Annotated[
    int,
    typer.Option("-m", "--microbatches", help="Number of microbatches of one pipeline in a step."),
]
CostsText = Annotated[
    str,
    typer.Option(
        help="Costs of passes: times in any unit, or a JSON file of measured costs. "
        "f=10,i=12,w=8,comm=1 are forward pass, input gradient and weight gradient of a "
        "microbatch on one rank, and one message. output_layer=5/6/4 adds those three of the "
        "output layer, tower=8/9/6 those of an encoder on the first stage, and embedding=1/1 "
        "forward pass and weight gradient of the embedding."
    ),
]
UNIT = "f=1,i=1,w=1,comm=0"
Limit = Annotated[str | None, declared_option("memory_limit")]
Speeds = Annotated[str | None, declared_option("rank_speeds")]
WorldSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="For launches: number of ranks. Default: the number in the launcher's flags, the log "
        "or the file, or the ranks of one copy of the model.",
    ),
]
HtmlPage = Annotated[
    Path | None,
    typer.Option(
        "--html",
        help="Write a page for a browser into this .html file: timelines to zoom into, the passes "
        "that each pass waited for, the critical path, and memory.",
    ),
]


def gpu_option(what: str, more: str = "") -> Any:
    """Return the option that names a GPU.

    Args:
        what: words on the purpose of the GPU, with which the help begins.
        more: sentences on further values.
    """
    return typer.Option(
        help=f"{what}: a name such as h100 (an unknown name lists all), or its achieved rates: "
        f"operations=400e12,bytes=40e9,memory=80GiB are operations a second, bytes of messages a "
        f"second, and its memory. {more}{' ' if more else ''}A rank's tensors, CUDA, NCCL and the "
        f"allocator's reserve may take {USABLE:.0%} of the memory."
    )
