"""Make a Megatron dataset from the text files of a folder: one document a file, one token a byte.

    python scripts/prepare_text.py FOLDER --output PREFIX --suffix .py .md

writes PREFIX.bin and PREFIX.idx. Token 0-255 is the byte, 256 ends a document. Train on it with

    --data-path PREFIX --tokenizer-type NullTokenizer --vocab-size 257

NullTokenizer takes the last of its ids, here 256, as the end of a document. Without --suffix
every file that holds no NUL byte is taken. Hidden files and folders and empty files are ignored.
--tokens 1000000 takes no further file once it has that many.

Megatron caches its sample indices under PREFIX/cache and does not notice that a dataset has
changed, so an existing dataset is not overwritten.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

END_OF_DOCUMENT = 256
VOCABULARY = 257


@dataclass(frozen=True)
class Summary:
    """Name and counts of a written dataset."""

    prefix: str
    documents: int
    tokens: int
    vocab_size: int


def text_files(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """Return the files under ``folder`` to read, in an order that is the same on every machine."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and (not suffixes or path.suffix in suffixes)
        and path.is_file()
    ]
    if not files:
        kind = f" with suffix {' or '.join(suffixes)}" if suffixes else ""
        raise ValueError(f"{folder} holds no file{kind}")
    return files


def documents(files: Sequence[Path], enough: int | None = None) -> Iterator[np.ndarray]:
    """Yield the tokens of each file that is text and not empty, with an end-of-document token.

    Once there are ``enough`` tokens, no further file is read.
    """
    from tqdm import tqdm

    tokens_so_far = 0
    for path in tqdm(files, unit="file", disable=None):
        if enough is not None and tokens_so_far >= enough:
            return
        content = path.read_bytes()
        if content and b"\0" not in content:
            tokens = np.frombuffer(content, dtype=np.uint8).astype(np.uint16)
            yield np.append(tokens, np.uint16(END_OF_DOCUMENT))
            tokens_so_far += len(tokens) + 1


def write(files: Sequence[Path], prefix: Path, enough: int | None = None) -> Summary:
    """Write the dataset of ``files`` to ``prefix``, completely or not at all.

    Once the dataset has ``enough`` tokens, no further file is read.
    """
    finished = [Path(f"{prefix}.bin"), Path(f"{prefix}.idx")]
    for path in finished:
        if path.exists():
            raise ValueError(
                f"{path} exists; choose another --output, or delete {prefix}.bin, {prefix}.idx "
                f"and Megatron's cached indices in {prefix}/"
            )
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=prefix.parent, prefix=f".{prefix.name}-") as partial:
        data, index = Path(partial, "data.bin"), Path(partial, "data.idx")
        builder = _builder(data)
        count = tokens = 0
        for document in documents(files, enough):
            builder.add_document(document, [len(document)])
            count += 1
            tokens += len(document)
        if not count:
            raise ValueError(f"none of the {len(files)} files is text: all are empty or binary")
        builder.finalize(str(index))
        # The index file is written last: without it Megatron sees no dataset.
        os.replace(data, finished[0])
        os.replace(index, finished[1])
    return Summary(str(prefix), count, tokens, VOCABULARY)


def _builder(data: Path) -> IndexedDatasetBuilder:
    with warnings.catch_warnings():
        # Megatron warns about each optional package that is missing.
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    return IndexedDatasetBuilder(str(data), dtype=DType.optimal_dtype(VOCABULARY))


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="read the files under this folder")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="PREFIX",
        help="path of the output without its suffix; default: the folder's name",
    )
    parser.add_argument(
        "--suffix",
        nargs="+",
        default=[],
        metavar=".EXT",
        help="read only files with these suffixes",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help="read no further file after N tokens; default: all files",
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    arguments = parser.parse_args(argv)
    prefix = arguments.output or Path(arguments.folder.resolve().name or "text")
    try:
        files = text_files(arguments.folder, arguments.suffix)
        summary = write(files, prefix, arguments.tokens)
    except (ValueError, OSError) as error:
        print(f"prepare_text: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(asdict(summary)))
    else:
        print(
            f"{summary.prefix}.bin and .idx: {summary.documents:,} documents, "
            f"{summary.tokens:,} tokens; train with --data-path {summary.prefix} "
            f"--tokenizer-type NullTokenizer --vocab-size {summary.vocab_size}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
