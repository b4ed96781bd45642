"""Megatron imported as a rank of a launch would import it, by a command that trains nothing."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

_LOGGER = "wandb"  # which Megatron imports where it is there, and needs only to log to it


@contextlib.contextmanager
def as_on(folder: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """The environment with the assignments of a launch line, and modules looked for as a rank would
    that starts in ``folder``: a checkout of Megatron there hides an installed one."""
    path = [str(folder), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(sys, "path", [*filter(None, path), *sys.path]),
    ):
        yield


@contextlib.contextmanager
def silently() -> Iterator[None]:
    """What Megatron and torch would say is kept back: it is theirs to say in a training."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


@contextlib.contextmanager
def quickly() -> Iterator[None]:
    """Imports of Megatron take half: what it has torch compile is left as it is, for which torch
    would import its compiler, no logger of experiments comes with it, and nothing is looked for
    that might be thrown away."""
    with contextlib.ExitStack() as stack:
        gc.disable()
        stack.callback(gc.enable)
        if _LOGGER not in sys.modules:
            sys.modules[_LOGGER] = None  # type: ignore[assignment]  # importing it fails
            stack.callback(sys.modules.pop, _LOGGER)
        with contextlib.suppress(ImportError):
            import torch

            stack.enter_context(mock.patch.object(torch, "compile", _not_compiled))
        yield


def _not_compiled(function: Any = None, **options: Any) -> Any:
    return (lambda function: function) if function is None else function
