"""A caller's script, launched on forked ranks as by ``python -m megatron_ext SCRIPT``."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

import torch

from megatron_ext.__main__ import main
from tests.helpers.ranks import agent_store, run_ranks, torchrun_environment, values


def printed_by_ranks(script: Path, ranks: int, variables: dict[str, str]) -> str:
    """Run ``script`` on ``ranks`` ranks with ``variables`` in the environment, and return
    everything that they printed."""

    def on_rank(rank: int) -> str:
        # The stance "force_eager" keeps torch from compiling. Test processes set it in the
        # environment.
        torch.compiler.set_stance("force_eager")
        os.environ |= torchrun_environment(rank, ranks, port) | variables
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            main([str(script)])
        return printed.getvalue()

    with agent_store() as port:
        return "".join(values(run_ranks(ranks, on_rank, connect=False)))
