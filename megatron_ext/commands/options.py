"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object or list.")]
Schedule = Annotated[
    str,
    typer.Argument(
        metavar="SPEC",
        help="A name of 'megatron-ext schedules', NAME[:key=value,...], auto, or a .csv or .py "
        "file.",
    ),
]
Ranks = Annotated[int, typer.Option(help="Pipeline ranks.")]
Microbatches = Annotated[
    int, typer.Option("-m", "--microbatches", help="Microbatches of one step.")
]
CostsText = Annotated[
    str,
    typer.Option(
        help="Times of passes, in any unit: f=10,i=12,w=8,comm=1 per microbatch of a rank, "
        "in addition head=5/6/4,embedding=1/1 for the whole output layer and embedding, "
        "tower=8/9/6 for an encoder on the first stage; or a JSON file."
    ),
]
UNIT = "f=1,i=1,w=1,comm=0"
Limit = Annotated[
    str | None,
    typer.Option(
        help=(
            "Limit of the activations of a rank: 5 (microbatches), 0.5x (of 1F1B's peak) or "
            "60GiB. Default: no limit."
        )
    ),
]
Speeds = Annotated[
    str | None,
    typer.Option(
        "--rank-speeds",
        metavar="S,S,...",
        help=(
            "Speed of each pipeline rank relative to the costs: with 1,1,0.77,1 rank 2 takes 1.3 "
            "times as long. Default: 1 for all."
        ),
    ),
]
Vision = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|SIZES",
        help=(
            "Vision tower on the first stage: clip, siglip, internvit, radio and so on, or sizes "
            "such as layers=27,hidden=1152,heads=16,ffn=4304. A frozen tower is followed by "
            "trained=projector or trained=none."
        ),
    ),
]
VisionTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        help=(
            "Tokens of the vision tower for each sample. Default: as many as the language model "
            "has."
        ),
    ),
]
SliceCount = Annotated[
    int, typer.Option("--slices", min=1, help="Slices of each microbatch along its sequence.")
]
SliceLengths = Annotated[
    str,
    typer.Option(
        metavar="{even,balanced,TOKENS,...}",
        help="Lengths of the slices: even, balanced (equal work; give attention= in COSTS), or "
        "token counts such as 4096,2048,1024,1024.",
    ),
]
InPairs = Annotated[
    bool,
    typer.Option(
        "--pairs",
        help="Run forward and backward passes overlapped, so that they hide each other's "
        "all-to-all; give hidden= in COSTS.",
    ),
]
PostValidation = Annotated[
    bool,
    typer.Option(
        "--post-validation",
        help="Experimental: overlap steps; the optimizer steps before all ranks are done.",
    ),
]
MegatronArgs = Annotated[
    Path | None,
    typer.Option(
        metavar="LOG",
        help=(
            "Log of an earlier start, in place of a launch command. The log has Megatron's "
            "arguments."
        ),
    ),
]
Bridge = Annotated[
    str | None,
    typer.Option(
        "--bridge",
        metavar="MODULE:FUNCTION",
        help="Function that returns a Megatron-Bridge config, as its recipes do, in place of a "
        "launch command.",
    ),
]
HtmlPage = Annotated[
    Path | None,
    typer.Option(
        "--html",
        help="Write a page for a browser, .html: timelines to zoom into, who waited for whom, the "
        "critical path, memory.",
    ),
]
