"""Folders of checkpoints as Megatron writes them, with one tensor."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

SIZE = torch.Size([4, 32])


def write(folder: Path, common: object, *, in_shard: bool = True) -> Path:
    """Write a checkpoint with one tensor: as Megatron 0.19 does or, as in earlier versions, with a
    separate file for the state that all ranks share."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    saved = io.BytesIO()
    torch.save([common] if in_shard else common, saved)
    data = saved.getvalue()
    places = {MetadataIndex("a.weight"): _StorageInfo("__0_0.distcp", 0, 512)}
    if in_shard:
        places[MetadataIndex("common_state/shard_0_1")] = _StorageInfo(
            "__0_0.distcp", 512, len(data)
        )
    else:
        (folder / "common.pt").write_bytes(data)
    chunks = [ChunkStorageMetadata(torch.Size([0, 0]), SIZE)]
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), SIZE, chunks)
    index = Metadata({"a.weight": tensor}, storage_data=places)
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    (folder / "__0_0.distcp").write_bytes(bytes(512) + data)
    return folder
