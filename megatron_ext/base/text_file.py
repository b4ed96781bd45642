"""A user's file, read or written.

Users give files of any encoding, size and content, in folders that may be full or write-protected.
Each error of reading names the file and what it should have been. Writing replaces a file whole or
leaves it as it was.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_ext.base.words import bytes_text, shown

_CHUNK = 2**16  # bytes that are read at a time
LARGEST = 2**28  # largest text file in bytes; no table is nearly as large
LARGEST_SCRIPT = 2**24  # largest number of characters of a script that are searched
# Largest JSON file in bytes; its parsed values take up to thirty times as much memory.
LARGEST_JSON = 2**25

# Documentation page that lists renamed keys of files by file version.
RENAMED_KEYS = "docs/public.md#renamed-keys"

_STREAMS = {"stdout": 1, "stderr": 2}
_OPENED = re.compile(rf"/dev/({'|'.join(_STREAMS)})|/(?:dev|proc/self)/fd/([0-9]+)")

_PATH = 200  # longest part of a path in characters that an error repeats


def how_to_rename(version: object, known: int) -> str:
    """Return the start of an error's advice on a file of an old ``version``: to rename its keys.

    "" unless the version is one before the ``known`` version, as a user can edit only such a file.
    """
    return f"rename its keys as {RENAMED_KEYS} says, or " if version == known - 1 else ""


def read_text_file(path: Path, what: str, largest: int = LARGEST) -> str:
    """Return the text of the UTF-8 file ``path``, without a byte order mark, newlines as ``\\n``.

    Errors call the file ``what``, such as "costs file".

    Raises:
        ValueError: it cannot be read, has more than ``largest`` bytes, or is not UTF-8.
    """
    try:
        data = bytearray()
        with path.open("rb") as file:
            while len(data) <= largest and (more := file.read(_CHUNK)):
                data += more
    except FileNotFoundError:
        where = "" if path.is_absolute() else f" in {Path.cwd()}, where a relative path starts"
        raise ValueError(
            f"{what} {shown(path, _PATH)} cannot be read: no such file{where}"
        ) from None
    except OSError as error:
        raise ValueError(f"{what} {shown(path, _PATH)} cannot be read: {error.strerror}") from None
    except ValueError as error:  # the operating system refuses a path with a null character
        raise ValueError(f"{what} {shown(path)} cannot be read: {error}") from None
    if len(data) > largest:
        raise ValueError(
            f"{what} {path} has more than {bytes_text(largest)}, more than any such file needs: "
            "check that this is the right file"
        )
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{what} {path} is not UTF-8 text (byte {error.object[error.start]:#04x} at position "
            f"{error.start}): save it as UTF-8"
        ) from None


def read_lines(path: Path, what: str, longest: int) -> Iterator[str]:
    """Yield the lines of the file ``path``, with their newlines.

    The file may be larger than this machine's memory. Errors call it ``what``.

    Raises:
        ValueError: it cannot be read, is not UTF-8, or has a line of more than ``longest``
            characters.
    """
    number = 0
    try:
        with path.open(encoding="utf-8") as file:
            while line := file.readline(longest + 1):
                number += 1
                if len(line) > longest:
                    raise ValueError(
                        f"{what} {path}, line {number}: the line has more than {longest:,} "
                        "characters, more than any such file needs: check that this is the right "
                        "file"
                    )
                yield line
    except OSError as error:
        raise ValueError(f"{what} {shown(path, _PATH)} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{what} {path} is not UTF-8 text after line {number}") from None


def parse_json(text: str) -> Any:
    """Return the value of the JSON document ``text``.

    Raises:
        ValueError: ``text`` is not JSON, too deeply nested, or has an integer of too many digits.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from None


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give the block a temporary path to write to; its content then replaces that of ``path``.

    If the block fails, ``path`` stays as it was. So there is no half file after a full disk, nor a
    mixture of what two processes write. A device, such as /dev/null, is written to as it is.
    /dev/stdout and its like get the content as if it was printed: a file that the shell has opened
    for it must not be replaced.

    Raises:
        OSError: the file cannot be written. ``filename`` is ``path``.
    """
    try:
        if (opened := _OPENED.fullmatch(str(path))) is not None:
            name, number = opened.groups()
            with tempfile.TemporaryDirectory() as folder:
                yield (begun := Path(folder, path.name))
                _print(begun, int(number) if name is None else _STREAMS[name])
            return
        # Devices and folders are opened directly: a device is written, and a folder fails with its
        # own error.
        if path.exists() and not path.is_file():
            yield path
            return
        target = Path(os.path.realpath(path))  # the file that a symbolic link leads to
        if target.exists() and not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        begun = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}.begun")
        try:
            yield begun
            if target.exists():
                shutil.copymode(target, begun)
            begun.replace(target)
        except BaseException:
            with contextlib.suppress(OSError):
                begun.unlink()
            raise
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


def _print(file: Path, number: int) -> None:
    """Append the contents of ``file`` to the output of this process on descriptor ``number``."""
    sys.stdout.flush()
    sys.stderr.flush()
    with file.open("rb") as content, open(os.dup(number), "wb") as printed:
        shutil.copyfileobj(content, printed)


def write_text_file(path: Path, text: str) -> None:
    """Replace the file ``path`` by ``text``, or leave it as it was if that fails (`whole_file`)."""
    with whole_file(path) as begun:
        begun.write_text(text, encoding="utf-8")
