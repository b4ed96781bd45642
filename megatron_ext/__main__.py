"""``python -m megatron_ext SCRIPT ARGS`` launches a script; anything else is a command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron_ext.config import PipelineConfig
from megatron_ext.launch import is_launch, launch


def main(argv: Sequence[str]) -> None:
    if is_launch(argv):
        launch(argv, _choose)
    else:
        from megatron_ext.cli import app

        app(prog_name="megatron-ext")


def _choose(
    argv: Sequence[str], config: PipelineConfig, world_size: int
) -> tuple[tuple[str, ...], str]:
    from megatron_ext.launch_check.plan import choose_for  # torch and Megatron

    chosen = choose_for(argv, config, world_size)
    return chosen.flags, chosen.why


if __name__ == "__main__":
    main(sys.argv[1:])
