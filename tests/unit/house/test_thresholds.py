"""Tests that the table of the planner's thresholds has every constant of the code, with its value,
unit and source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "planning.md"
PACKAGES = ("planner", "launch/planner")


def constants(source: str) -> Iterator[tuple[str, str]]:
    """Yield the names and values of a module's constants that are numbers or consist of numbers."""
    for node in ast.parse(source).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if is_number(value):
                yield name, ast.unparse(value)
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                for target, value in zip(names, values, strict=True):
                    if is_number(value):
                        yield ast.unparse(target), ast.unparse(value)


def is_number(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=value):
            return isinstance(value, int | float) and not isinstance(value, bool)
        case ast.Tuple(elts=parts):
            return bool(parts) and all(map(is_number, parts))
        case ast.BinOp(left=left, op=ast.Mult() | ast.Sub(), right=right):
            return all(isinstance(part, ast.Name) or is_number(part) for part in (left, right))
        case ast.UnaryOp(operand=operand):
            return is_number(operand)
    return False


def rows() -> list[list[str]]:
    section = PAGE.read_text().split("\n## Thresholds\n")[1]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_constants_are_found() -> None:
    source = (
        "A = 1\n_B, _C = 0.5, (1, 2)\nD = 'text'\nE = 2 * A\nF = True\nG = ('a', 1)\nH = int | str"
    )
    expected = {"A": "1", "_B": "0.5", "_C": "(1, 2)", "E": "2 * A"}
    assert dict(constants(source)) == expected


def test_the_table_has_the_values_of_the_code() -> None:
    """docs/planning.md lists every threshold with the code's value. Without a row a reader could
    not tell whether a threshold was measured or chosen."""
    top = ROOT / "megatron_ext"
    expected = {
        f"`{path.relative_to(top).as_posix()}:{name}`": value
        for package in PACKAGES
        for path in sorted((top / package).rglob("*.py"))
        for name, value in constants(path.read_text())
    }
    written = {constant: value for _, value, _, constant, _ in rows()}
    assert written == expected, "docs/planning.md#thresholds: change the rows"
    assert len(rows()) == len(expected) and all(map(all, rows()))
