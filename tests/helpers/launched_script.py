"""A caller's script that is launched on forked ranks, as ``python -m megatron_ext SCRIPT`` is."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

import torch

from megatron_ext.__main__ import main
from tests.helpers.ranks import agent_store, run_ranks, torchrun_environment, values


def printed_by_ranks(script: Path, ranks: int, variables: dict[str, str]) -> str:
    """Run ``script`` on so many ``ranks``, with ``variables`` of the environment, and return what
    they printed."""

    def on_rank(rank: int) -> str:
        torch.compiler.set_stance("force_eager")  # as the launcher says before torch is imported
        os.environ |= torchrun_environment(rank, ranks, port) | variables
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            main([str(script)])
        return printed.getvalue()

    with agent_store() as port:
        return "".join(values(run_ranks(ranks, on_rank, connect=False)))
