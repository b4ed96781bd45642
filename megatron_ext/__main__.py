"""Entry point of ``python -m megatron_ext``, which has two uses.

With a script, ``python -m megatron_ext SCRIPT ARGS``, it launches the script under our patches, as
torchrun calls it on each rank. With anything else it is the command ``megatron-ext``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron_ext.base.errors import exit_for
from megatron_ext.launch.planner.chosen_plan import choose_plan
from megatron_ext.launch.script import is_launch, launch, refuse_flags_before_script


def main(argv: Sequence[str]) -> None:
    if is_launch(argv):
        launch(argv, choose_plan)
    else:
        try:
            refuse_flags_before_script(argv)
        except ValueError as error:
            exit_for(error)
        from megatron_ext.cli import app

        app(list(argv), prog_name="megatron-ext")


if __name__ == "__main__":
    main(sys.argv[1:])
