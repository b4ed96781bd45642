"""Tests of users' files: they are written whole or not at all, and read only if they are
readable."""

from __future__ import annotations

import ast
import importlib
import os
import stat
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from typer.testing import CliRunner

import megatron_ext
from megatron_ext.__main__ import main
from megatron_ext.base.text_file import parse_json, read_text_file, whole_file, write_text_file
from megatron_ext.cli import app
from tests.helpers.forked import run_forked
from tests.helpers.full_disk import full_disk

PACKAGE = Path(megatron_ext.__file__).parent


@pytest.mark.parametrize("name", ["old", "new"])
@pytest.mark.parametrize(
    ("option", "suffix"),
    [
        ("--csv", ".csv"),
        ("--torch-csv", ".csv"),
        ("--program", ".txt"),
        ("--perfetto", ".json"),
        ("--html", ".html"),
        ("--plot", ".svg"),
        ("--plot", ".png"),
    ],
)
def test_a_full_disk_leaves_what_was_there(
    option: str, suffix: str, name: str, tmp_path: Path
) -> None:
    """If the disk is full, an output file keeps its former contents, and the error names it. The
    error used to be "[Errno 28] No space left on device" without a path, and the file was cut
    off."""
    path = tmp_path / (name + suffix)
    if name == "old":
        path.write_text("as it was")
    with full_disk(100):
        done = CliRunner().invoke(
            app, ["simulate", "1f1b", "--pp", "4", "-m", "8", option, str(path)]
        )
    assert done.exit_code == 2
    assert f"error: {path}: File too large" in done.output
    assert [file.read_text() for file in tmp_path.iterdir()] == ["as it was"] * (name == "old")


def test_a_full_disk_spoils_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The helper that emulates a full disk writes no bytecode of modules. A test with it used to
    pass once and never again on the same machine: the bytecode of modules that it imported first
    was cut off, for all later processes."""
    (tmp_path / "new_module.py").write_text(f"text = {'x' * 1000!r}")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    with full_disk(100):
        importlib.import_module("new_module")
    del sys.modules["new_module"]
    assert importlib.import_module("new_module").text == "x" * 1000


def test_the_standard_output_is_full() -> None:
    """If standard output cannot be written, a command ends with one line. It used to end with a
    traceback of fifty lines."""
    command = [sys.executable, "-m", "megatron_ext", "schedules"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == ("megatron-ext: error: the standard output: No space left on device\n")


def test_a_link_stays_one_and_a_file_keeps_its_mode(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("old")
    file.chmod(0o640)
    link.symlink_to(file)
    write_text_file(link, "new")
    assert link.is_symlink() and file.read_text() == "new"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


def test_a_device_is_written_to_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="'/dev/full'"):
        write_text_file(Path("/dev/full"), "x" * 100_000)
    with pytest.raises(OSError, match=f"Is a directory: '{tmp_path}'"):
        write_text_file(tmp_path, "x")
    assert not list(tmp_path.iterdir())


def test_a_file_that_the_shell_has_opened_is_not_replaced(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A command that writes to /dev/stdout does not replace the file that the shell has opened.
    `--csv /dev/stdout >> log` used to replace the log: its contents and the rest of the command's
    output were lost."""
    log = tmp_path / "log"
    log.write_text("earlier\n")
    words = ["simulate", "1f1b", "--pp", "2", "-m", "2", "--csv", "/dev/stdout"]

    def run() -> None:
        with log.open("a") as stdout:
            os.dup2(stdout.fileno(), 1)
            with redirect_stdout(stdout), pytest.raises(SystemExit) as ended:
                main(words)
        assert not ended.value.code

    said = tmp_path_factory.mktemp("log") / "said"
    assert run_forked(run, said) == 0, said.read_text()
    text = log.read_text()
    assert text.startswith("earlier\n0F0,0F1,0B0,0B1\n") and "makespan" in text
    assert list(tmp_path.iterdir()) == [log]


def test_two_that_write_one_file_do_not_meet(tmp_path: Path) -> None:
    """Two processes that write the same file each write a whole one, and the last wins. Both
    processes used to write one temporary file next to it: the first file was a mixture, and the
    second process found nothing to rename. A user's own file of that name was overwritten."""
    path, other = tmp_path / "file", tmp_path / "file.begun"
    other.write_text("a user's")
    with whole_file(path) as first:
        first.write_text("first")
        with whole_file(path) as second:
            second.write_text("second, and longer")
        assert path.read_text() == "second, and longer"
    assert path.read_text() == "first" and other.read_text() == "a user's"
    assert sorted(tmp_path.iterdir()) == [path, other]


def test_whatever_ends_the_block_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), whole_file(tmp_path / "file") as begun:
        begun.write_text("half")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


# Modules that write files by themselves, because these are no files of users or cannot be written
# as a whole.
_OTHERS = {
    "recordings/writing.py",  # a recording grows with its run, and its last line is its end
    "parity/runs.py",  # the output of a compared run
    "search/disk_cache.py",  # a cache, written as a whole
    "rehearsal/processes.py",  # the log of the process that starts ranks, while it runs
    "rehearsal/server.py",  # replies to a pipe; the output of a rank's process is the rank's log
    "observe/trace.py",  # a training's trace grows, and is whole after each step
}


_WRITING = ("write_text", "write_bytes", "open", "fdopen")  # functions that may write


def test_nothing_else_writes_files() -> None:
    writes = set()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        if any(name in text for name in _WRITING):
            calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
            if any(map(_writes, calls)):
                writes.add(str(path.relative_to(PACKAGE)))
    assert writes == _OTHERS | {"base/text_file.py"}


def _writes(call: ast.Call) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if name not in _WRITING:
        return False
    if name in ("write_text", "write_bytes"):
        return True
    words = [*call.args, *(keyword.value for keyword in call.keywords)]
    texts = [str(word.value) for word in words if isinstance(word, ast.Constant)]
    # the mode of an open, and not a word such as errors="replace"
    modes = [text for text in texts if set(text) <= set("rwaxbt+")]
    is_writing = any(set(mode) & set("wax+") for mode in modes)
    return is_writing


def test_a_file_of_any_length_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_text("x" * 1000)
    assert read_text_file(path, "costs file", 1000) == "x" * 1000
    with pytest.raises(ValueError, match=r"costs file .*large has more than 999 B, more than any"):
        read_text_file(path, "costs file", 999)
    with pytest.raises(ValueError, match=r"schedule file /dev/zero has more than 0\.25 GiB"):
        read_text_file(Path("/dev/zero"), "schedule file")


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"])
def test_a_name_that_cannot_be_one(name: str) -> None:
    with pytest.raises(ValueError, match=r"costs file .* cannot be read") as refusal:
        read_text_file(Path(name), "costs file")
    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "9" * 5000], ids=len)
def test_whatever_is_wrong_with_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"Expecting|recursion|digits"):
        parse_json(text)
