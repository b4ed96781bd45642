"""A function with which a test asserts that a check accepts something."""

from __future__ import annotations

from collections.abc import Callable


def accepts(check: Callable[..., object], *given: object) -> bool:
    """Return whether ``check`` raises no ValueError for ``given``, and print the error if it
    does."""
    try:
        check(*given)
    except ValueError as error:
        print(error)
        return False
    return True
