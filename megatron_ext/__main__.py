"""``python -m megatron_ext SCRIPT ARGS`` launches a script; anything else is a command."""

from __future__ import annotations

import sys

from megatron_ext.launch import is_launch, launch


def main() -> None:
    if is_launch(sys.argv[1:]):
        launch(sys.argv[1:])
    else:
        from megatron_ext.cli import app

        app(prog_name="megatron-ext")


if __name__ == "__main__":
    main()
