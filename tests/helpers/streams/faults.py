"""Seeded faults: each of this project's waits and each `record_stream` is removed in turn.

Such a call in our sources is a site, identified by its file, function and text, so that other lines
may move. Seeding a fault replaces the code of its function in this process by code in which no
stream waits there. Ranks that are forked while the fault is seeded run this code. Works of gloo are
still waited for, as numbers that have not arrived would end the run before it shows anything.

A wait of the host orders nothing on a stream that uses the same memory, so it is no site: a wait
listed in `HOST_WAITS`; a wait with a timeout, which is for threads and stores; and `synchronize`,
with which a host reads a time, bounds its lead over the device or frees host memory.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.streams.groups import EmulatedWork

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("megatron_ext/runtime", "megatron_ext/adapter", "megatron_ext/features", "patches")

_BETWEEN_HOSTS = "the message goes from host to host, over a group that is made for hosts"
_ON_CPU = "the host waits for a gather of gloo, which has no streams"
_FIGURES = "the host waits for figures that it prints, which it has in memory of its own"

# Allowed waits of hosts by file and function, each with its reason.
HOST_WAITS: dict[tuple[str, str], str] = {
    ("megatron_ext/runtime/messages/channels.py", "Channels.receive_shape"): _BETWEEN_HOSTS,
    **{
        (
            "megatron_ext/features/post_validation/runtime/messages.py",
            f"ValidationMessages.{name}",
        ): (_BETWEEN_HOSTS)
        for name in ("partial", "verdict", "take")
    },
    ("megatron_ext/runtime/measure/exchange.py", "AsyncAllGather.wait"): _FIGURES,
    ("megatron_ext/runtime/recording.py", "RecordedReduction.wait_for_ends"): _FIGURES,
    ("megatron_ext/features/metrics/adapter/step_metrics.py", "StepMetrics.finish"): _FIGURES,
    ("patches/cpu.py", "_single_gathers"): _ON_CPU,
}

_WITH_ARGUMENTS = {"wait_event", "wait_stream", "record_stream"}


@dataclass(frozen=True)
class Site:
    """A call at ``line`` of ``function``, which is an outermost function or a method."""

    file: str
    function: str
    text: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file} {self.function}: {self.text}"

    def taken_out(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which no stream waits at this site."""
        tree = _Without(self).visit(ast.parse((ROOT / self.file).read_text()))
        return _swapped(self.file, self.function, tree)


@dataclass(frozen=True)
class Edit:
    """A change to a function: ``old``, which occurs there once, becomes ``new``."""

    file: str
    function: str
    old: str
    new: str

    def made(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the function is changed."""
        text = (ROOT / self.file).read_text()
        assert text.count(self.old) == 1, f"{self.file} has changed"
        return _swapped(self.file, self.function, ast.parse(text.replace(self.old, self.new)))


def sites() -> tuple[Site, ...]:
    """Return all sites in our sources: calls by which a stream, or the allocator, waits."""
    return tuple(site for site in calls() if (site.file, site.function) not in HOST_WAITS)


@functools.cache
def calls() -> tuple[Site, ...]:
    """Return the sites, and the waits of the host that look like sites."""
    found: list[Site] = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            finder = _Finder(str(path.relative_to(ROOT)))
            finder.visit(ast.parse(path.read_text()))
            found += finder.found
    return tuple(found)


def _is_site(call: ast.Call) -> bool:
    """Return whether ``call`` makes a stream wait. Waits of the host that are listed in
    `HOST_WAITS` look the same, so the result is True for them, too."""
    if not isinstance(call.func, ast.Attribute):
        return False
    if call.func.attr in _WITH_ARGUMENTS:
        return True
    return call.func.attr == "wait" and not call.args and not call.keywords


class _Finder(ast.NodeVisitor):
    def __init__(self, file: str) -> None:
        self.found: list[Site] = []
        self._file = file
        self._names: list[str] = []
        self._functions = 0

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._within(node, is_function=False)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._within(node, is_function=True)

    def visit_Call(self, node: ast.Call) -> None:
        if self._functions and _is_site(node):
            place = ".".join(self._names)
            text = ast.unparse(node)
            self.found.append(Site(self._file, place, text, node.lineno, node.col_offset))
        self.generic_visit(node)

    def _within(self, node: Any, *, is_function: bool) -> None:
        is_inner = self._functions > 0  # an inner function's code is part of the outer function's
        self._functions += is_function
        if not is_inner:
            self._names.append(node.name)
        self.generic_visit(node)
        if not is_inner:
            self._names.pop()
        self._functions -= is_function


class _Without(ast.NodeTransformer):
    def __init__(self, site: Site) -> None:
        self._place = site.line, site.column

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if _is_site(node) and (node.lineno, node.col_offset) == self._place:
            assert isinstance(node.func, ast.Attribute)
            ends = ast.parse(f"__import__({__name__!r}, fromlist=['end']).end()", mode="eval").body
            assert isinstance(ends, ast.Call)
            ends.args = [node.func.value]
            return ends
        return node


def end(waited_for: Any) -> None:
    """Stand in for a removed call: wait only for gloo."""
    for work in getattr(waited_for, "works", [waited_for]):  # the works of a batch of collectives
        if isinstance(work, EmulatedWork):
            work.end()


@contextlib.contextmanager
def _swapped(file: str, function: str, tree: ast.AST) -> Iterator[None]:
    """Replace the code of ``function`` in this process by its code in the syntax tree ``tree``."""
    filled: Any = ast.fix_missing_locations(tree)
    code = compile(filled, str(ROOT / file), "exec", dont_inherit=True)
    with pytest.MonkeyPatch.context() as patch:
        swapped = inspect.unwrap(_function(file, function))
        patch.setattr(swapped, "__code__", _code_of(code, function))
        yield


def _function(file: str, function: str) -> Any:
    package = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    if package.startswith("patches"):
        package = f"megatron_ext.{package}"
    found: Any = importlib.import_module(package)
    for name in function.split("."):
        found = inspect.getattr_static(found, name)
    if isinstance(found, property):
        return found.fget
    # the plain function of a staticmethod or a classmethod
    return getattr(found, "__func__", found)


def _code_of(code: types.CodeType, name: str) -> types.CodeType:
    for part in name.split("."):
        code = next(
            const
            for const in code.co_consts
            if isinstance(const, types.CodeType) and const.co_name == part
        )
    return code
