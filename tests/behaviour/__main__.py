"""A record of behaviour that must not change while files move: written, and compared.

python -m tests.behaviour write|compare FOLDER [SUBJECT ...]

The record of this repository is in tests/records. ``compare`` prints the differences from it, and
exits with 1 if there are any. After an intended change, ``write`` renews the record, and git shows
the change. It takes about a minute, and needs Megatron as scripts/environment.sh installs it,
without Transformer Engine and without a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.behaviour.record import differences, from_text, taken, to_text, workplace
from tests.behaviour.subjects import SUBJECTS


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.behaviour")
    parser.add_argument("what", choices=["write", "compare"])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "subjects",
        nargs="*",
        metavar="SUBJECT",
        help=f"subjects of the records: {', '.join(SUBJECTS)}",
    )
    given = parser.parse_args(words)
    for name in given.subjects:
        if name not in SUBJECTS:
            parser.error(f"there is no subject {name}: {', '.join(SUBJECTS)}")
    folder: Path = given.folder.resolve()
    changes = 0
    for name in given.subjects or SUBJECTS:
        with workplace():
            record = taken(SUBJECTS[name]())
        file = folder / f"{name}.txt"
        if given.what == "write":
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(to_text(record))
            print(f"{file}: {len(record)} entries")
            continue
        if not file.is_file():
            parser.error(f"there is no record {file}: write it first")
        texts = differences(from_text(file.read_text()), record)
        print(f"{name}: {len(texts)} of {len(record)} entries differ")
        for text in texts:
            print("\n  ".join(text.splitlines()))
        changes += len(texts)
    return int(changes > 0)


if __name__ == "__main__":
    sys.exit(main())
