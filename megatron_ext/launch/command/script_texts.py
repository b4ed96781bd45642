"""Text of a script and of the modules that it imports, in which its own flags are found. Nothing is
imported: a script may need what this machine lacks."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.base.text_file import LARGEST_SCRIPT
from megatron_ext.launch.command.launch_words import Launch

_MOST = 100  # largest number of modules that are read
_NOT_READ = {"megatron", "megatron_ext", *sys.stdlib_module_names}


@dataclass(frozen=True)
class ScriptTexts:
    """Source texts of a training script, and of its own modules that it imports.

    Attributes:
        finds_all: whether each imported package is the script's own, or installed here.
    """

    text: str
    finds_all: bool


@dataclass(frozen=True)
class _Import:
    """Module that a script imports.

    ``level`` counts the dots before its name. An optional module may be missing, since the script
    catches that.
    """

    name: str
    level: int
    is_optional: bool


def read_script_texts(launch: Launch, script: str | None) -> ScriptTexts | None:
    """Return the source texts of the script of ``launch`` and its modules; None without ``script``.

    ``script`` is the text of the script itself.
    """
    if script is None:
        return None
    path = Path(launch.script)
    if launch.is_module:
        path = Path(*launch.script.split(".")).with_suffix(".py")
    searched = launch.environment.get("PYTHONPATH", "").split(os.pathsep)
    folders = [path.parent, Path(), *(Path(folder) for folder in searched if folder)]
    texts, finds_all = [script], True
    read, waiting = {path.resolve()}, [(path, script)]
    while waiting and len(read) < _MOST:
        importing, text = waiting.pop()
        for imported in _imports(text):
            files = list(_files(imported, importing, folders))
            finds_all &= bool(files) or imported.is_optional or _is_installed(imported)
            for file in files:
                if file.resolve() in read:
                    continue
                read.add(file.resolve())
                try:
                    found = file.read_text()[:LARGEST_SCRIPT]
                except (OSError, UnicodeDecodeError):
                    continue
                texts.append(found)
                waiting.append((file, found))
    return ScriptTexts("\n".join(texts), finds_all)


def _imports(text: str) -> Iterator[_Import]:
    """Yield the modules that the Python source ``text`` imports; none if it cannot be parsed."""
    try:
        tree = ast.parse(text)
    except (MemoryError, RecursionError, SyntaxError, ValueError):
        return
    caught = {id(node) for tried in _of_type(tree, ast.Try) for node in ast.walk(tried)}
    for node in ast.walk(tree):
        is_optional = id(node) in caught
        if isinstance(node, ast.Import):
            yield from (_Import(alias.name, 0, is_optional) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if base:
                yield _Import(base, node.level, is_optional)
            for alias in node.names:  # an imported name may itself be a module
                name = f"{base}.{alias.name}" if base else alias.name
                yield _Import(name, node.level, True)


def _of_type(tree: ast.AST, kind: type[ast.AST]) -> Iterator[ast.AST]:
    return (node for node in ast.walk(tree) if isinstance(node, kind))


def _files(imported: _Import, importing: Path, folders: Sequence[Path]) -> Iterator[Path]:
    """Yield the source files of an imported module that belongs to the script."""
    parts = imported.name.split(".")
    if imported.level:
        folders = [importing.parent.joinpath(*[".."] * (imported.level - 1))]
    elif parts[0] in _NOT_READ:
        return
    for folder in folders:
        module = folder.joinpath(*parts)
        for file in (module.with_suffix(".py"), module / "__init__.py"):
            if file.is_file():
                yield file
                return


def _is_installed(imported: _Import) -> bool:
    top = imported.name.partition(".")[0]
    if imported.level or top in _NOT_READ:
        return not imported.level
    try:
        return importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        return False
