"""A helper by which a test asserts that checks accept something."""

from __future__ import annotations

from collections.abc import Callable


def accepts(check: Callable[..., object], *given: object) -> bool:
    """Whether ``check`` raises no ValueError for ``given``; prints the error if it does."""
    try:
        check(*given)
    except ValueError as error:
        print(error)
        return False
    return True
