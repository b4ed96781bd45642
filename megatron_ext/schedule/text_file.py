"""A user's file as text, read or written."""

from __future__ import annotations

from pathlib import Path


def read_text_file(path: Path, what: str) -> str:
    """What ``path``, a ``what`` such as "costs file", holds: UTF-8, byte order mark or not.

    Raises:
        ValueError: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        where = "" if path.is_absolute() else f" in {Path.cwd()}, where a relative path starts"
        raise ValueError(f"{what} {path} cannot be read: no such file{where}") from None
    except OSError as error:
        raise ValueError(f"{what} {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{what} {path} is not UTF-8 text (byte {error.object[error.start]:#04x} at position "
            f"{error.start}): save it as UTF-8"
        ) from None


def write_text_file(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` as a whole, or leave what is there. Raises OSError."""
    if path.exists() and not path.is_file():  # a device, or a folder, which says so
        path.write_text(text)
        return
    begun = path.with_name(f"{path.name}.begun")
    try:
        begun.write_text(text)
        begun.replace(path)
    except OSError:
        begun.unlink(missing_ok=True)
        raise
