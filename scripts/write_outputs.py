"""Write the outputs of commands in README.md and docs/ anew.

    python scripts/write_outputs.py [--quick] [PAGE ...]

An output stands beneath its command, in a block with this mark above it:

    <!-- output: written by scripts/write_outputs.py -->
    ```console
    $ megatron-ext simulate zb-h1 --pp 4 -m 8 | head -3
    ```

``<!-- slow output: ... -->`` marks what takes longer than some seconds; --quick leaves such outputs
as they stand. It also leaves docs/recipes.md, which scripts/evaluation writes.
``<!-- output | sed 9q: ... -->`` shortens what is shown. A page's commands run in one shell, in a
folder with the files that the page shows (blocks whose first line is ``# NAME.py``, ``# NAME.sh``
or ``# NAME.log``) and a ``pretrain_gpt.py``; outputs are what they print to stdout on a terminal of
120 columns, without a GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "docs" / "recipes.md"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
COLUMNS = 120

_BLOCK = re.compile(
    r"^<!-- (?P<slow>slow )?output(?: \| (?P<filter>[^\n]+))?: "
    r"written by scripts/write_outputs\.py -->\n"
    r"```console\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)\n", re.MULTILINE)
_FILE = re.compile(r"^```\w+\n(# ([\w.-]+\.(?:py|sh|log))\n.*?)^```$", re.DOTALL | re.MULTILINE)
_MEGATRON_EXT = "megatron-ext() { python -c 'from megatron_ext.cli import app; app()' \"$@\"; }"
_END = "=== end of an output, exit status"


@dataclass(frozen=True)
class Block:
    """Commands with their outputs, as they stand on a page.

    Attributes:
        text: the commands and outputs.
        is_slow: whether they take more than some seconds.
        shortened_by: shell command that reads an output and prints what the page shows of it; None
            if it shows all.
    """

    commands: tuple[str, ...]
    text: str
    is_slow: bool
    shortened_by: str | None


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("pages", nargs="*", type=Path, metavar="PAGE", default=PAGES)
    parser.add_argument(
        "--quick", action="store_true", help="leave outputs of slow commands as they are"
    )
    arguments = parser.parse_args(words)
    if not arguments.quick and RECIPES in arguments.pages:
        command = [sys.executable, "-m", "scripts.evaluation", "recipes"]
        subprocess.run(command, cwd=ROOT, check=True)
    for page in arguments.pages:
        text = page.read_text()
        if not list(blocks(text)):
            continue
        print(f"{page.name}: ", end="", flush=True)
        written = with_outputs(text, quick=arguments.quick)
        page.write_text(written)
        print("as it was" if written == text else "written anew")


def blocks(page: str) -> Iterator[Block]:
    """Yield the marked blocks in the text of a page."""
    for found in _BLOCK.finditer(page):
        commands = tuple(_COMMAND.findall(found["text"]))
        yield Block(commands, found["text"], found["slow"] is not None, found["filter"])


def with_outputs(page: str, *, quick: bool) -> str:
    """Return the text of a page with its outputs made anew; if ``quick``, slow ones stay.

    Raises:
        ValueError: a command cannot run. Its exit status is 2 or more; 1 only says that something
            is wrong.
    """
    run = [block for block in blocks(page) if not (quick and block.is_slow)]
    printed = iter(outputs([command for block in run for command in block.commands], page))
    for block in run:
        written = [
            f"$ {command}\n{shortened(next(printed), block.shortened_by)}"
            for command in block.commands
        ]
        page = page.replace(f"```console\n{block.text}", f"```console\n{''.join(written)}")
    return page


def outputs(commands: Sequence[str], page: str) -> list[str]:
    """Return the output of each command of a page. They run one after the other in one shell."""
    status = f"printf '\\n{_END} %s\\n' ${{PIPESTATUS[0]}}"
    script = "\n".join([_MEGATRON_EXT, *(f"{command}\n{status}" for command in commands)])
    with tempfile.TemporaryDirectory() as folder:
        write_files(page, Path(folder))
        ended = subprocess.run(
            ["bash", "-c", script],
            cwd=folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    *printed, rest = re.split(rf"^{_END} (\d+)\n", ended.stdout, flags=re.MULTILINE)
    for command, status in zip(commands, printed[1::2], strict=True):
        if int(status) > 1:
            raise ValueError(f"$ {command}\nended with {status}: {ended.stderr}{rest}")
    return [text.removesuffix("\n") for text in printed[::2]]


def shortened(printed: str, command: str | None) -> str:
    """Return what the page shows of an output: its lines after the filter ``command``.

    Spaces at the ends of lines and empty lines around the output are removed.
    """
    if command is not None:
        printed = subprocess.run(
            ["bash", "-c", command], input=printed, capture_output=True, text=True, check=True
        ).stdout
    return "".join(f"{line.rstrip()}\n" for line in printed.strip("\n").splitlines())


def write_files(page: str, folder: Path) -> None:
    """Write the files that the page shows into ``folder``, and a script to train with."""
    for text, name in _FILE.findall(page):
        (folder / name).write_text(text)
    (folder / "pretrain_gpt.py").symlink_to(ROOT / "scripts" / "pretrain_gpt.py")


def environment() -> dict[str, str]:
    """Return the environment of a terminal without colours, on a machine without a GPU."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    terminal = {"FORCE_COLOR": "1", "TERM": "dumb", "COLUMNS": str(COLUMNS), "LINES": "50"}
    ours = {"PATH": path, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **terminal, **ours}


if __name__ == "__main__":
    main(sys.argv[1:])
