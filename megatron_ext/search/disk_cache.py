"""Cache of results that took a while to compute, in the user's cache directory.

A cache may vanish, break or be unwritable at any time. The work is repeated then, and the user is
told once that nothing can be stored.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from pathlib import Path

from megatron_ext.progress import remark


def directory() -> Path:
    """Return the folder of the entries: ``$XDG_CACHE_HOME/megatron_ext``, by default in
    ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "megatron_ext"


# Packages of megatron_ext whose code decides what a search finds. A test compares them with what
# they import.
PACKAGES = ("compile", "schedule", "schedule_families", "search")


@functools.cache
def _code() -> str:
    """Return a digest of the code that decides what a search finds."""
    digest = hashlib.sha256()
    top = Path(__file__).parents[1]
    for path in sorted(path for name in PACKAGES for path in (top / name).rglob("*.py")):
        digest.update(f"{path.relative_to(top)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _path(name: str, inputs: str) -> Path:
    key = hashlib.sha256(f"{_code()}\n{inputs}".encode()).hexdigest()
    return directory() / f"{name}-{key[:32]}.csv"


def load(name: str, inputs: str) -> str | None:
    """Return the text stored for ``inputs``, which are all that the result depends on except our
    code; None if there is none."""
    try:
        return _path(name, inputs).read_text()
    except (OSError, UnicodeDecodeError):
        return None


def store(name: str, inputs: str, text: str) -> None:
    """Store ``text``. Readers see the whole of it or nothing."""
    path = _path(name, inputs)
    try:
        _write(path, text)
    except OSError as error:
        remark(
            f"found schedules cannot be stored in {path.parent} ({error.strerror}), so each run "
            f"searches again; set XDG_CACHE_HOME to a folder that can be written"
        )


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise
