"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
            "Number of tokens of the vision tower for each sample. Default: as many as the "
            "language model has."
        ),
    ),
]
SliceCount = Annotated[
    int,
    typer.Option(
        "--slices",
        min=1,
        help="Number of slices into which each microbatch is cut along its sequence.",
    ),
]
SliceLengthsOption = Annotated[
    str,
    typer.Option(
        metavar="{even,balanced,TOKENS,...}",
        help="Lengths of the slices: even, balanced (equal work; needs attention= in --costs), or "
        "token counts such as 4096,2048,1024,1024.",
    ),
]
InPairs = Annotated[
    bool,
    typer.Option(
        "--pairs",
        help="Overlap the forward pass of one microbatch with the backward pass of another, so "
        "that each hides the other's all-to-all. overlap_saving= in --costs is the time that a "
        "pair saves. Default: it saves none.",
    ),
]
PostValidationOption = Annotated[
    bool,
    typer.Option(
        "--post-validation",
        help="Experimental: overlap consecutive steps. The optimizer steps before the global "
        "gradient norm is known, and undoes the step if the norm demands it.",
    ),
]
MegatronArgs = Annotated[
    Path | None,
    typer.Option(
        metavar="LOG",
        help=(
            "Log of an earlier start with Megatron's list of arguments, in place of a launch "
            "command."
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
        help="Write a page for a browser into this .html file: timelines to zoom into, the passes "
        "that each pass waited for, the critical path, and memory.",
    ),
]
