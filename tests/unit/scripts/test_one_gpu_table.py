"""Tests of scripts/gpu_tests.sh --one-gpu, which prints a complete table however its cases end."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests.gpu.one_gpu import host_calls, spinning
from tests.gpu.one_gpu.cases import CALLS, SANITIZER, parts
from tests.gpu.one_gpu.rehearsal import CRITERIA, GAIN, TRUTH
from tests.gpu.one_gpu.rows import Row, State, names_error, parse, table
from tests.gpu.one_gpu.runner import Case, Part, run_part
from tests.gpu.one_gpu.wheels import unpack

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "gpu_tests.sh"
TELLS = "from tests.gpu.one_gpu.rows import CannotRun, run_case, tell\n"
ENDINGS = {
    "well": "tell('well', '1 | 2')",
    "lacks": "def run(): raise CannotRun('no second GPU')\nrun_case('lacks', run)",
    "fails": "def run(): tell('a', '1'); raise ValueError('wrong\\n  of it\\nOSError: end')\n"
    "run_case('fails', run)",
    "dies": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "raises": "raise OSError('no such thing')",
    "misses": "import no_such_package",
    "silent": "print('row-less')",
    "hangs": "import time; tell('hangs', 'half'); print('at the door', flush=True); time.sleep(60)",
    "late": "tell('late', 'never')",
    "new": "tell('new', 'never')",
}
EXPECTED = [
    Row("well", "1 | 2"),
    Row("lacks", "no second GPU", State.CANNOT_RUN),
    Row("a", "1"),
    Row("fails", "ValueError: wrong; OSError: end", State.FAILED),
    Row("dies", "ended with -9; it printed nothing (log: dies.log)", State.FAILED),
    Row("raises", "ended with 1; OSError: no such thing (log: raises.log)", State.FAILED),
    Row(
        "misses",
        "ModuleNotFoundError: No module named 'no_such_package' (log: misses.log)",
        State.CANNOT_RUN,
    ),
    Row("silent", "ended without a row", State.FAILED),
    Row("hangs", "half"),
    Row("hangs", "did not end in 3 s; at the door (log: hangs.log)", State.FAILED),
    Row("new", "needs Python 4.0", State.CANNOT_RUN),
    Row("late", "the part's 0 s were over before its turn came", State.FAILED),
]


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write modules with cases, one for each way in which a case can end, and return their
    folder."""
    for name, text in ENDINGS.items():
        (tmp_path / f"ends_{name}.py").write_text(TELLS + text)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    return tmp_path


@pytest.mark.real_time
def test_however_a_case_ends_there_is_a_row(modules: Path) -> None:
    cases = [Case(name, (f"ends_{name}",), 3 if name == "hangs" else 60) for name in ENDINGS]
    begin = time.monotonic()
    *early, late, new = cases
    rows = list(run_part(Part((*early, replace(new, python=(4, 0))), 300), modules))
    rows += run_part(Part((late,), 0), modules)
    assert rows == EXPECTED
    assert time.monotonic() - begin < 50
    assert "Fatal Python error: Aborted" in (modules / "hangs.log").read_text(), "where it hung"


def test_the_table_is_markdown() -> None:
    assert table(EXPECTED[:2] + EXPECTED[3:4]).splitlines() == [
        "| case | figure |",
        "|-|-|",
        "| well | 1 \\| 2 |",
        "| lacks | not run: no second GPU |",
        "| fails | **failed**: ValueError: wrong; OSError: end |",
    ]
    assert [parse(row.line()) for row in EXPECTED] == EXPECTED
    assert parse("anything else") is None


def test_a_ranks_error_is_named() -> None:
    """The table names the error of a GPU rank, although torch prints the rank before each line of
    the traceback."""
    assert names_error("[rank0]: TypeError: wrong") and names_error("torch.OutOfMemoryError: x")
    assert not names_error("[rank0]:[W1126] Warning: WARNING: destroy_process_group() Error")


def test_nothing_is_missing_and_the_time_is_bounded() -> None:
    all_parts = parts("cuda")
    known = ["calls", "executor", "nccl", "gpt", "engine", "streams", "graphs", "layers"]
    known += ["rehearsal", "replay"]
    assert list(all_parts) == known
    assert set(CALLS) == set(host_calls.CALLS)
    for part in all_parts.values():
        names = [case.name for case in part.cases]
        assert len(set(names)) == len(names)
        assert part.seconds < 9 * 60
    assert sum(part.seconds for part in all_parts.values()) < 57 * 60
    page = (ROOT / "docs" / "measurements.md").read_text()
    assert "| one GPU, and 57 minutes |" in page
    rows = re.findall(r"^\| (`[a-z`, ]+`) \| .* \| (\d+) s(?: each)? \|$", page, re.MULTILINE)
    on_page = {name: int(most) for names, most in rows for name in re.findall(r"\w+", names)}
    assert on_page == {name: part.seconds for name, part in all_parts.items()}
    names = [case.name for case in all_parts["gpt"].cases]
    for words in ("zb-h1 async", "zb-v async", "v-half async", "zb-v batched"):
        assert f"gpt schedule local {words}" in names
    names = [case.name for case in all_parts["engine"].cases]
    for layers in ("engine", "fp8"):
        assert f"gpt schedule {layers} zb-v async" in names
    checked = [case for case in all_parts["streams"].cases if SANITIZER in case.environment]
    assert {case.words[0].rpartition(".")[2] for case in checked} == {"streams", "two_ranks"}
    assert "streams capture" in [case.name for case in all_parts["streams"].cases]
    assert not any(SANITIZER in case.environment for case in parts("cpu")["streams"].cases)


def test_criteria_of_a_rehearsal_name_their_figures() -> None:
    assert len(CRITERIA) == 9
    assert GAIN.told(4.9).endswith("4.9 points, limit 5: holds")
    assert TRUTH.told(2.1).endswith("2.1 %, limit 2: DOES NOT HOLD")


def test_what_is_not_here_is_said_at_once(tmp_path: Path) -> None:
    """The probe of one GPU says at once what is missing. A torch that finds no GPU replaces the
    real one, whose import takes two seconds."""
    asked = tmp_path / "asked"
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("from torch import cuda\n")
    (tmp_path / "torch" / "cuda.py").write_text(
        f"def is_available():\n    return open({str(asked)!r}, 'w').close()\n"
    )
    for words, said in (([], "--rehearse"), (["--rehearse", "x"], "there is no part x")):
        ended = subprocess.run(
            [SCRIPT, "--one-gpu", *words],
            env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 2 and said in ended.stderr, ended.stderr
        assert asked.exists(), "torch is the one who knows"


def test_an_old_python_can_run_the_probe() -> None:
    """An old Python can run the probe: the Python of a GPU machine may be older than megatron_ext
    requires."""
    folder = ROOT / "tests" / "gpu" / "one_gpu"
    around = ("__main__", "cases", "rows", "runner", "wheels", "machine")
    for name in (*around, "spinning", "host_calls"):
        ast.parse((folder / f"{name}.py").read_text(), feature_version=(3, 9))


def test_wheels_are_unpacked_where_nothing_is_installed(tmp_path: Path) -> None:
    for name in ("numpy-1.0-py3-none-any.whl", "not_installed-2.0-py3-none-any.whl"):
        with zipfile.ZipFile(tmp_path / name, "w") as wheel:
            wheel.writestr("not_installed/__init__.py", "")
    for _ in "12":
        (brought,) = unpack(tmp_path, tmp_path / "packages")
        assert Path(brought, "not_installed", "__init__.py").is_file()
        assert Path(brought).name == "not_installed-2.0"


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas to assemble the kernel")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_a_spinning_block_owns_its_multiprocessor(architecture: str, tmp_path: Path) -> None:
    """A spinning block occupies its whole multiprocessor. Its kernel takes nearly all of the 65,536
    registers, so no other block fits next to it, and not more than all, so it can start."""
    (tmp_path / "spin.ptx").write_text(spinning.kernel())
    ended = subprocess.run(
        ["ptxas", "-v", f"-arch={architecture}", "spin.ptx", "-o", "spin.cubin"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    used = int(ended.stderr.split("Used ")[1].split()[0])
    taken = spinning.THREADS * (used + -used % 8)
    assert 0.9 * 65_536 < taken <= 65_536


def test_the_peaks_on_a_gpu_are_those_of_the_page_of_measurements() -> None:
    """README says by how much peaks on a GPU were above the prediction. The page of measurements
    has a number for each way to send messages, of which README has the largest."""
    page = (ROOT / "docs" / "measurements.md").read_text()
    above = re.findall(r"^\| executor.* peak.* to ([\d.]+) % above", page, re.MULTILINE)
    (said,) = re.findall(
        r"peaks within ([\d.]+) % of the prediction", (ROOT / "README.md").read_text()
    )
    assert len(above) == 2 and float(said) == max(map(float, above))
