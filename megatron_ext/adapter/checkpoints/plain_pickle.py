"""Pickles read without running what they name.

A pickle calls any function that it names. Here each name becomes a class whose objects only store
their arguments, so a checkpoint of somebody else can be looked at before it is trusted.
"""

from __future__ import annotations

import io
import pickle
import time
import zipfile
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch

from megatron_ext.base.words import bytes_text

# Limits for reading one pickle. A checkpoint whose pickle is larger, or takes longer, is not
# judged. The pickled index of a model with a trillion parameters on thousands of ranks has some
# hundred MiB.
SECONDS = 20.0
LARGEST = 2**30  # largest pickle in bytes

_CONTAINERS: dict[tuple[str, str], Any] = {
    ("argparse", "Namespace"): Namespace,
    ("types", "SimpleNamespace"): SimpleNamespace,
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("torch", "Size"): tuple,
}


class OpaqueObject:
    """Object in a pickle whose class is not imported.

    The object has the ``args`` with which it was created, and its attributes.
    """

    args: tuple[Any, ...] = ()

    def __new__(cls, *args: Any, **_: Any) -> OpaqueObject:
        made = super().__new__(cls)
        made.args = args
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        pass


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(_Timed(file, time.monotonic() + SECONDS))
        self._classes: dict[tuple[str, str], Any] = dict(_CONTAINERS)

    def find_class(self, module: str, name: str) -> Any:
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        made = self._classes.get((module, name))
        if made is None:
            made = type(
                name.rpartition(".")[2] or "opaque", (OpaqueObject,), {"__module__": module}
            )
            self._classes[module, name] = made
        return made

    def persistent_load(self, _: Any) -> None:
        """Return nothing for a tensor's storage, which is not read."""
        return


class _Timed:
    """File whose reads fail after a deadline, so that a hostile pickle cannot occupy its reader.

    A pickle is read in pieces of 64 KiB.
    """

    def __init__(self, file: IO[bytes], deadline: float) -> None:
        self._file, self._deadline = file, deadline

    def read(self, size: int = -1) -> bytes:
        self._look()
        return self._file.read(size)

    def readinto(self, buffer: Any) -> int:
        self._look()
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def readline(self) -> bytes:
        self._look()
        return self._file.readline()

    def _look(self) -> None:
        if time.monotonic() > self._deadline:
            raise ValueError(f"reading the pickled file took more than {SECONDS:.0f} s")


def read_pickle(path: Path) -> Any:
    """Return the object in the pickle at ``path``, without importing the classes that it names.

    Raises:
        ValueError: the pickle cannot be read; the text says why.
    """
    _check_size(path.stat().st_size)
    with path.open("rb") as file:
        return _read(file)


def read_saved(data: bytes | Path) -> Any:
    """Return the object that torch.save wrote into ``data``, with None in place of tensor contents.

    Raises:
        ValueError: ``data`` cannot be read; the text says why.
    """
    try:
        with zipfile.ZipFile(data if isinstance(data, Path) else io.BytesIO(data)) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            _check_size(archive.getinfo(name).file_size)
            with archive.open(name) as file:
                return _read(file)
    except zipfile.BadZipFile as error:
        raise ValueError(f"the file was not written by torch.save: {error}") from None


def _check_size(size: int) -> None:
    if size > LARGEST:
        raise ValueError(
            f"the pickle has {bytes_text(size)}, and at most {bytes_text(LARGEST)} are read"
        )


def _read(file: IO[bytes]) -> Any:
    try:
        return _Unpickler(file).load()
    except OSError as error:
        raise ValueError(str(error)) from None
    except ValueError:
        raise
    except Exception as error:  # the contents of a pickle may raise anything
        raise ValueError(f"the pickle cannot be read: {error}") from None
