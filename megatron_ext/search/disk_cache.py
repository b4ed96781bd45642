"""Cache of results that took a while to compute, in the user's cache directory.

A cache may vanish, break or be unwritable at any time. The work is repeated then, and the user is
told once that nothing can be stored. Compiled code runs when it is loaded, so a folder is used only
if its user alone can have written there.
"""

from __future__ import annotations

import functools
import hashlib
import os
import stat
import tempfile
from pathlib import Path

from megatron_ext.base.progress import remark
from megatron_ext.base.text_file import LARGEST

# Permission bits of group and others: to write, and to enter a folder.
_WRITABLE, _REACHABLE = 0o022, 0o011


def directory() -> Path | None:
    """Return the folder in which search results are cached, ``$XDG_CACHE_HOME/megatron_ext``.

    The default is in ``~/.cache``; None if the user has no home.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    if base.startswith("~"):
        _remark("there is no home for a cache")
        return None
    return Path(base) / "megatron_ext"


def is_private(folder: Path) -> bool:
    """Return whether only its user can have written into ``folder``, which is made if missing.

    If others can have written there, a remark says once why the folder is not used.

    Raises:
        OSError: the folder cannot be made or looked at.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(0o700, exist_ok=True)  # another rank may make the folder at the same time
        path.chmod(0o700)  # sets the mode regardless of the umask
    status = folder.stat()
    if status.st_uid != os.geteuid():
        _remark(f"{folder} is not used: it belongs to user {status.st_uid}, not {os.geteuid()}")
        return False
    if status.st_mode & _WRITABLE:
        _remark(f"{folder} is not used: others may write there; remove it")
        return False
    return True


def _remark(why: str) -> None:
    remark(
        f"{why}. Each run searches and compiles again; set XDG_CACHE_HOME to a folder that only "
        f"you can write"
    )


def foreign_file(folder: Path) -> Path | None:
    """Return an entry of the cache ``folder`` that must not be read; None if there is none.

    Other users may have written it, or it is no file to be read: a link, a device, or too large.
    """
    is_reachable = folder.stat().st_mode & _REACHABLE
    for path in folder.rglob("*"):
        status = path.lstat()
        kind = stat.S_IFMT(status.st_mode)
        if (
            kind not in (stat.S_IFREG, stat.S_IFDIR)
            or status.st_uid != os.geteuid()
            or status.st_size > LARGEST
            or (is_reachable and status.st_mode & _WRITABLE)
        ):
            return path
    return None


# Packages of megatron_ext whose code decides what a search finds, and the parts of features that
# change programs. A change of their sources invalidates the cache. A test compares the list with
# the imports of searches.
PACKAGES = ("compile", "schedule", "schedule_families", "search")
_PARTS = ("schedule.py", "schedule/**/*.py")


@functools.cache
def _code() -> str:
    """Return a digest of the package's code that decides what a search finds, as part of cache
    keys."""
    digest = hashlib.sha256()
    top = Path(__file__).parents[1]
    packages = [path for name in PACKAGES for path in (top / name).rglob("*.py")]
    parts = [path for part in _PARTS for path in (top / "features").glob(f"*/{part}")]
    for path in sorted((*packages, *parts)):
        digest.update(f"{path.relative_to(top)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _path(folder: Path, name: str, inputs: str) -> Path:
    key = hashlib.sha256(f"{_code()}\n{inputs}".encode()).hexdigest()
    return folder / f"{name}-{key[:32]}.csv"


def load(name: str, inputs: str) -> str | None:
    """Return the cached text for ``inputs``; None if there is none.

    ``inputs`` are all that the result depends on, except this package's code.
    """
    folder = directory()
    try:
        if folder is None or not is_private(folder):
            return None
        return _read(_path(folder, name, inputs))
    except (OSError, UnicodeDecodeError):
        return None


def _read(path: Path) -> str | None:
    """Return the text of the file ``path``; None if it is no regular file, or too large."""
    # Without O_NONBLOCK the opening of a pipe would block.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        is_entry = stat.S_ISREG(status.st_mode) and status.st_size <= LARGEST
        return file.read() if is_entry else None


def store(name: str, inputs: str, text: str) -> None:
    """Write ``text`` into the cache for ``inputs``. Readers see the whole text or nothing."""
    folder = directory()
    if folder is None:
        return
    try:
        if is_private(folder):
            _write(_path(folder, name, inputs), text)
    except OSError as error:
        remark(
            f"found schedules cannot be stored in {folder} ({error.strerror}), so each run "
            f"searches again; set XDG_CACHE_HOME to a folder that only you can write"
        )


def _write(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise
