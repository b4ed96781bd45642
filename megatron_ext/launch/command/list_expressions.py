"""Lists as Megatron's flags have them: ``([0]*3+[1]*5)*2``.

Megatron evaluates these as Python. Its check of the characters lets through powers and products
that take all memory, and what is no list ends in a traceback.
"""

from __future__ import annotations

import argparse
import ast
import functools
from collections.abc import Callable
from typing import Any

from megatron_ext.base.words import shown

_MOST = 10**6  # largest number of items in a list, and largest number in a list expression
_Value = int | list[Any]


def bounded(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return ``read``, the type of an argument of Megatron's, with a check of its list expression.

    Megatron evaluates the expression as Python.
    """

    @functools.wraps(read)
    def checked(text: Any) -> Any:
        if isinstance(text, str) and "[" in text:
            _check(text)
        return read(text)

    return checked


def _check(text: str) -> None:
    """Raise ArgumentTypeError unless ``text`` is a list expression of integers.

    A list expression that takes long to evaluate is refused, too.
    """
    try:
        if isinstance(_value(ast.parse(text, mode="eval").body), list):
            return
    except (MemoryError, RecursionError, SyntaxError, ValueError):
        pass
    raise argparse.ArgumentTypeError(
        f"{shown(text)!r} does not give a list of at most {_MOST:,} integers; write one such as "
        "([0]*3+[1]*5)*2"
    )


def _value(node: ast.expr) -> _Value:
    """Return the value of a list expression.

    Raises ValueError if it is not allowed, or too large.
    """
    match node:
        case ast.Constant(bool()):
            pass
        case ast.Constant(int(number)) if number <= _MOST:
            return number
        case ast.List(items):
            return [_value(item) for item in items]
        case ast.BinOp(left, ast.Add() | ast.Mult() as operation, right):
            return _result(_value(left), _value(right), isinstance(operation, ast.Mult))
    raise ValueError


def _result(left: _Value, right: _Value, is_product: bool) -> _Value:
    size_of_left, size_of_right = (
        len(operand) if isinstance(operand, list) else operand for operand in (left, right)
    )
    size = size_of_left * size_of_right if is_product else size_of_left + size_of_right
    if size > _MOST:
        raise ValueError
    match left, right, is_product:
        case int(), int(), _:
            return size
        case list(), list(), False:
            return [*left, *right]
        case (list() as items, int() as times, True) | (int() as times, list() as items, True):
            return items * times
    raise ValueError
