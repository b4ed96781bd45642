"""Everything that one GPU can show, as a table: docs/measurements.md.

python -m tests.gpu.one_gpu [--rehearse] [--results FOLDER] [PART ...]
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from tests.gpu.one_gpu.cases import parts
from tests.gpu.one_gpu.rows import Row, State, table
from tests.gpu.one_gpu.runner import ROOT, Case, Part, run_part
from tests.gpu.one_gpu.wheels import unpack


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # sys.exit also ends the running case
    parser = argparse.ArgumentParser(prog="scripts/gpu_tests.sh --one-gpu")
    parser.add_argument(
        "--rehearse", action="store_true", help="run the parts on the CPU, with gloo"
    )
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "gpu-tests")
    parser.add_argument("--wheels", type=Path, default=Path(os.environ.get("WHEELS", "wheels")))
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"parts to run: {', '.join(parts('cpu'))}"
    )
    given = parser.parse_args()
    known = parts("cpu" if given.rehearse else "cuda")
    for name in given.parts:
        if name not in known:
            parser.error(f"there is no part {name}: {', '.join(known)}")
    if not given.rehearse and not _has_gpu():
        parser.error("torch finds no GPU here: --rehearse runs the same cases on the CPU")
    results = (given.results / "one-gpu").resolve()
    brought = unpack(given.wheels, results / "packages")
    if brought:
        os.environ["PYTHONPATH"] = os.pathsep.join([*brought, os.environ.get("PYTHONPATH", "")])
        print(f"from {given.wheels}: {', '.join(Path(path).name for path in brought)}", flush=True)
    if given.rehearse:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    machine = Part((Case("machine", ("tests.gpu.one_gpu.machine",), 60),), 60)
    rows: list[Row] = []
    for name, part in {"machine": machine, **known}.items():
        if name == "machine" or not given.parts or name in given.parts:
            rows += _show(part, results / name)
    print(f"\n{table(rows)}", flush=True)
    (results / "table.md").write_text(f"{table(rows)}\n")
    return int(any(row.state is State.FAILED for row in rows))


def _show(part: Part, folder: Path) -> list[Row]:
    """Run ``part``, and print its rows as they come."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rows = []
    for row in run_part(part, folder):
        print(f"[{row.state.value}] {row.case}: {row.figure}", flush=True)
        rows.append(row)
    return rows


def _has_gpu() -> bool:
    """Return whether torch finds a GPU, tested in another process, so that a broken torch is only a
    row of the table."""
    asked = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", asked]).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
