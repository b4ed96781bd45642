"""Tests of scripts/environment.sh, which finds a Python by running candidates, and says which ones
it tried.

A pyenv shim exists, is executable, and fails; a system Python may lack ensurepip. The script used
to find out only when the environment could not be created.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "environment.sh"

BASE_PYTHON = getattr(sys, "_base_executable", sys.executable)

SHIM = "#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n"

# Script that runs its arguments in an interpreter which is made to look like another one.
DISGUISED = f"""#!/bin/sh
shift
exec '{BASE_PYTHON}' -c 'import sys
{{disguise}}
exec(sys.argv[1])' "$@"
"""

GOOD = DISGUISED.format(disguise="")
OLD = DISGUISED.format(disguise="sys.version_info = (3, 11, 7)")
BARE = DISGUISED.format(disguise='sys.modules["ensurepip"] = None')


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a folder that is the whole PATH, so that no Python of this machine is found."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("bash", "dirname"):
        executable = shutil.which(tool)
        assert executable is not None
        (folder / tool).symlink_to(executable)
    return folder


def put(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)
    return file


def find(path: Path, **env: str) -> tuple[int, str, str]:
    """Return the exit status, the output and the errors of `find_python`."""
    command = f"set -euo pipefail; source '{SCRIPT}'; find_python; printf '%s' \"$FOUND_PYTHON\""
    ran = subprocess.run(
        [path / "bash", "-c", command],
        env={"PATH": str(path), "HOME": str(path.parent), **env},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return ran.returncode, ran.stdout, ran.stderr


def test_passes_over_what_does_not_work(path: Path) -> None:
    put(path / "python3.12", SHIM)
    put(path / "python3.13", OLD)
    put(path / "python3", GOOD)
    code, python, said = find(path)
    assert code == 0
    assert Path(python).samefile(BASE_PYTHON)
    assert said.startswith("environment: found Python 3.")


def test_named_python_comes_first(path: Path, tmp_path: Path) -> None:
    put(path / "python3.12", SHIM)
    code, python, _ = find(path, PYTHON=str(put(tmp_path / "mine" / "python", GOOD)))
    assert code == 0
    assert Path(python).samefile(BASE_PYTHON)


def test_says_why_the_named_python_is_not_used(path: Path, tmp_path: Path) -> None:
    put(path / "python3.13", GOOD)
    old = put(tmp_path / "mine" / "python", OLD)
    code, _, said = find(path, PYTHON=str(old))
    assert code == 0
    assert f"PYTHON={old}: is Python 3.11.7; trying others" in said


@pytest.mark.parametrize("with_command", [True, False])
def test_versions_of_pyenv_are_found_though_none_is_selected(
    path: Path, tmp_path: Path, with_command: bool
) -> None:
    root = tmp_path / ("elsewhere" if with_command else ".pyenv")
    put(root / "versions" / "3.11.7" / "bin" / "python", OLD)
    put(root / "versions" / "3.12.1" / "bin" / "python", GOOD)
    put(path / "python3.12", SHIM)
    if with_command:
        put(path / "pyenv", f"#!/bin/sh\necho '{root}'\n")
    code, python, _ = find(path)
    assert code == 0
    assert Path(python).samefile(BASE_PYTHON)


def test_uv_is_tried_last_and_fetches_a_python_only_if_it_has_none(
    path: Path, tmp_path: Path
) -> None:
    fetched = tmp_path / "fetched"
    uv = f"""#!/bin/sh
echo "$@" >>'{tmp_path}/calls'
case "$2" in
  find) [ -x '{fetched}' ] && echo '{fetched}' ;;
  install) /bin/cp '{put(tmp_path / "store", GOOD)}' '{fetched}' ;;
esac
"""
    put(path / "uv", uv)
    code, python, said = find(path)
    assert code == 0
    assert Path(python).samefile(BASE_PYTHON)
    assert "uv fetches Python 3.12" in said
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.split()[1] for call in calls] == ["find", "install", "find"]


def test_error_names_every_candidate_and_the_fix(path: Path, tmp_path: Path) -> None:
    put(path / "python3.12", SHIM)
    put(path / "python3", BARE)
    pyenv = put(tmp_path / ".pyenv" / "versions" / "3.11.7" / "bin" / "python", OLD)
    code, python, said = find(path)
    assert code == 1
    assert python == ""
    version = ".".join(map(str, sys.version_info[:3]))
    for line in (
        "no Python >= 3.12 with venv and ensurepip was found. Tried:",
        "  python3.12: does not run: pyenv: python3.12: command not found",
        "  python3.13: not there",
        f"  python3: is Python {version} without ensurepip",
        f"  {pyenv}: is Python 3.11.7",
        "  uv: not there",
        "PYTHON=/path/to/python3.12",
    ):
        assert line in said
