"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object or list.")]
Schedule = Annotated[
    str, typer.Argument(metavar="SPEC", help="NAME[:key=value,...] or a .csv or .py file")
]
Ranks = Annotated[int, typer.Option(help="Pipeline ranks.")]
Microbatches = Annotated[int, typer.Option("-m", "--microbatches", help="Of one step.")]
CostsText = Annotated[
    str,
    typer.Option(
        help="f=10,i=12,w=8,comm=1 per microbatch of a rank, head=5/6/4,embedding=1/1 for all of "
        "the output layer and of the embedding beside them; or a JSON file"
    ),
]
UNIT = "f=1,i=1,w=1,comm=0"
Limit = Annotated[str | None, typer.Option(help="5, 0.5x or 60GiB")]
PostValidation = Annotated[
    bool,
    typer.Option(
        "--post-validation", help="Overlap steps: the optimizer steps before all ranks are done."
    ),
]
