"""Count the Python statements of the product, its scripts and its benchmarks, without docstrings.

    python scripts/count_statements.py [REVISION]

The product is megatron_ext/ and patches/; scripts and benchmarks count wherever they lie, so that
moving one from one folder to another saves nothing. Tests and examples do not count. A statement is
a node of Python's syntax tree: comments, blank lines and line breaks change nothing. REVISION is a
git revision; without one the files of the working tree are counted.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("megatron_ext", "patches")
TOOLS = ("scripts", "benchmarks")
# Attributes of an AST node that are blocks of statements.
_BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def statements(source: str) -> int:
    """Return the number of statements in ``source``, without docstrings."""
    nodes: list[ast.AST] = [ast.parse(source)]
    # The loop also reaches nodes that it appends to this list. Expressions are skipped, as they
    # contain no statements.
    for node in nodes:
        for name in _BLOCKS:
            nodes += getattr(node, name, ())
    docstrings = [
        node
        for node in nodes
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None
    ]
    return sum(isinstance(node, ast.stmt) for node in nodes) - len(docstrings)


def counted(revision: str | None = None) -> Counter[str]:
    """Return the number of statements by top-level folder.

    They are those at ``revision``, or in the working tree.
    """
    listing = ["ls-tree", "-r", "--name-only", revision] if revision else ["ls-files"]
    names = [name for name in _git(*listing).splitlines() if name.endswith(".py")]
    counts: Counter[str] = Counter()
    for name in names:
        folder = name.split("/")[0]
        if folder in (*PRODUCT, *TOOLS):
            source = _git("show", f"{revision}:{name}") if revision else (ROOT / name).read_text()
            counts[folder] += statements(source)
    return counts


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("revision", nargs="?", metavar="REVISION")
    counts = counted(parser.parse_args().revision)
    product = sum(counts[folder] for folder in PRODUCT)
    tools = sum(counts[folder] for folder in TOOLS)
    print(f"product {product:,}, scripts and benchmarks {tools:,}, together {product + tools:,}")


if __name__ == "__main__":
    main()
