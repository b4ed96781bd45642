"""Import of Megatron as on a rank of a launch, by a command that trains nothing.

A command on a login node has to read a launch with the Megatron that the ranks would import, from
their folder. The command needs neither torch's compiler nor loggers of experiments, whose import
takes half of the time. What Megatron prints is not part of the command's output.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from megatron_ext.base.garbage import uncollected

_LOGGER = "wandb"  # package that Megatron imports if it is installed, and needs only for logging


@contextlib.contextmanager
def as_on(folder: Path | None, environment: Mapping[str, str]) -> Iterator[None]:
    """Context with the environment and the module search path of a rank started in ``folder``.

    A checkout of Megatron in that folder hides an installed one. If ``folder`` is None, no folder
    is searched in addition: what is read is data, and a file next to it must not run.
    """
    path = ["" if folder is None else str(folder)]
    path += environment.get("PYTHONPATH", "").split(os.pathsep)
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(sys, "path", [*filter(None, path), *sys.path]),
    ):
        yield


@contextlib.contextmanager
def silently() -> Iterator[None]:
    """Context in which the output of Megatron and torch is suppressed.

    That output belongs to a training.
    """
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
    """Context that halves the time of importing Megatron.

    torch compiles nothing, so that its compiler is not imported, and loggers of experiments are not
    imported.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(uncollected())
        if _LOGGER not in sys.modules:
            sys.modules[_LOGGER] = None  # type: ignore[assignment]  # importing it fails
            stack.callback(sys.modules.pop, _LOGGER)
        # An OSError is raised if torch is installed but libraries of it are not found.
        with contextlib.suppress(ImportError, OSError):
            import torch

            stack.enter_context(mock.patch.object(torch, "compile", _not_compiled))
        yield


def _not_compiled(function: Any = None, **options: Any) -> Any:
    return (lambda function: function) if function is None else function
