"""Tests of reading checkpoints before a launch: on a login node, from other people, perhaps broken.

Megatron's readers unpickle a checkpoint, which runs any function that the pickle names. Our reader
runs and imports nothing that a checkpoint names, ends in bounded time, and gives a reason for what
it cannot read.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import sys
import zipfile
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.adapter.checkpoints import plain_pickle
from megatron_ext.adapter.checkpoints.plain_pickle import OpaqueObject, read_pickle, read_saved
from megatron_ext.adapter.checkpoints.saved import Incomplete, read
from tests.helpers.saved_checkpoints import write


class Runs:
    """Object whose pickle removes a file when it is loaded by pickle."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.remove, (str(self.path),)


COMMON = {
    "args": Namespace(num_layers=4, params_dtype=torch.bfloat16),
    "content_metadata": {"distrib_optim_sharding_type": "dp_reshardable"},
    "opt_param_scheduler": {"max_lr": 0.1},
}


@pytest.mark.parametrize("in_shard", [True, False])
def test_what_a_checkpoint_says_of_itself(tmp_path: Path, in_shard: bool) -> None:
    saved = read(write(tmp_path / "saved", COMMON, in_shard=in_shard))
    assert saved.args == COMMON["args"] and saved.metadata == COMMON["content_metadata"]
    assert saved.scheduler == {"max_lr": 0.1} and saved.sizes == {"a.weight": (4, 32)}


@pytest.mark.parametrize("in_shard", [True, False])
def test_nothing_that_a_checkpoint_names_is_run(tmp_path: Path, in_shard: bool) -> None:
    """Reading a checkpoint runs no function that it names. A pickle may name any function, and so
    may the index of tensors."""
    victim = tmp_path / "victim"
    victim.write_text("here")
    folder = write(tmp_path / "saved", COMMON | {"more": Runs(victim)}, in_shard=in_shard)
    assert read(folder).args == COMMON["args"] and victim.exists()
    (folder / ".metadata").write_bytes(pickle.dumps(Runs(victim)))
    refused = pytest.raises(ValueError, match="no state that all ranks share")
    with refused if in_shard else nullcontext():
        read(folder)
    assert victim.exists()
    with pytest.raises(FileNotFoundError):  # loaded by pickle, the function does run
        pickle.loads(pickle.dumps(Runs(tmp_path / "nowhere")))


def test_nothing_that_a_checkpoint_names_is_imported(tmp_path: Path) -> None:
    path = tmp_path / "pickle"
    path.write_bytes(b"cnot_imported\nClass\n)\x81}(X\x01\x00\x00\x00aK\x01ub.")
    pickletools.dis(path.read_bytes(), io.StringIO())
    made = read_pickle(path)
    assert isinstance(made, OpaqueObject) and vars(made)["a"] == 1
    assert "not_imported" not in sys.modules


def test_a_tensor_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "saved.pt"
    torch.save({"a": torch.ones(1000), "b": 3}, path)
    shorter = io.BytesIO()
    with zipfile.ZipFile(path) as whole, zipfile.ZipFile(shorter, "w") as part:
        (name,) = [name for name in whole.namelist() if name.endswith("data.pkl")]
        part.writestr(name, whole.read(name))
    assert read_saved(shorter.getvalue())["b"] == 3


def test_reading_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "saved", COMMON)
    monkeypatch.setattr(plain_pickle, "SECONDS", -1.0)
    with pytest.raises(ValueError, match="took more than"):
        read(folder)
    monkeypatch.undo()
    monkeypatch.setattr(plain_pickle, "LARGEST", 100)
    with pytest.raises(ValueError, match="the pickle has"):
        read(folder)


def test_a_part_is_missing(tmp_path: Path) -> None:
    """The missing part of a checkpoint is named, for example after an interrupted copy. Megatron
    would end in the middle of its setup."""
    folder = write(tmp_path / "saved", COMMON)
    data = folder / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(Incomplete, match=r"__0_0\.distcp has"):
        read(folder)
    data.unlink()
    with pytest.raises(Incomplete, match=r"no __0_0\.distcp"):
        read(folder)
    (folder / ".metadata").unlink()
    with pytest.raises(Incomplete, match=r"no \.metadata"):
        read(folder)
    (folder / "metadata.json").unlink()
    with pytest.raises(Incomplete, match="does not know its format"):
        read(folder)


def test_what_is_not_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "mp_rank_00").mkdir()
    with pytest.raises(ValueError, match="format torch, which has one file per rank"):
        read(tmp_path)
    (tmp_path / "mp_rank_00").rmdir()
    (tmp_path / ".metadata").write_bytes(b"")
    with pytest.raises(ValueError, match="torch_dcp or fsdp_dtensor"):
        read(tmp_path)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(ValueError, match="the checkpoint's format is zarr"):
        read(tmp_path)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    with pytest.raises(ValueError, match="the pickle cannot be read"):
        read(tmp_path)
    (tmp_path / "metadata.json").write_text("{")
    with pytest.raises(ValueError):
        read(tmp_path)
