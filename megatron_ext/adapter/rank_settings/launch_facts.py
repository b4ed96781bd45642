"""Settings that all ranks of a launch must have in common.

Ranks with other settings wait for each other forever, or train without each other. A node with an
old checkout or with another environment variable is enough, so each rank states what it has, and
`store.agreement` compares it.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import megatron.core
import torch
import torch.distributed as dist

from megatron_ext.adapter.rank_settings.argument_facts import argument_facts, model_facts
from megatron_ext.adapter.training_globals import training_global
from megatron_ext.compile.registry import file_of
from megatron_ext.config import ALLOW_UNKNOWN, PipelineConfig, flag
from megatron_ext.runtime.messages.groups import timeout_of
from megatron_ext.runtime.store.agreement import Fact, agree
from megatron_ext.runtime.store.start import begin_start, keys_of_start
from megatron_ext.runtime.world import store_of_all

# With NCCL, init_process_group does not wait for other ranks, and a cold file system lets ranks
# start minutes apart.
PATIENCE = timedelta(minutes=5)


def refuse_other_launches(config: PipelineConfig) -> None:
    """Raise ValueError unless all ranks of the world have equal launch settings.

    Collective over the world, except for ranks without our settings, which do not take part. The
    other ranks wait for half of the timeout of torch's process group, and at least `PATIENCE`, so
    that such a rank is named before its own collectives fail. Nothing is compared if torch has no
    store (MPI), or if there is no other process.
    """
    store, facts = store_of_all(), launch_facts(config) | argument_facts(_megatrons_arguments())
    if store is not None:
        begin_start(
            agree(store, dist.get_rank(), dist.get_world_size(), facts, patience(_timeout()))
        )


def refuse_other_models(config: Any, model: Any) -> None:
    """Raise ValueError unless all ranks of the world have equal settings of ``model``.

    Megatron's arguments are compared earlier; if there are any, nothing is compared here.
    Collective over the world.
    """
    store = store_of_all()
    if store is None or _megatrons_arguments():
        return
    while hasattr(model, "module"):  # the class of a wrapper says nothing about the model
        model = model.module
    facts, ranks = model_facts(config, model), dist.get_world_size()
    agree(keys_of_start(store), dist.get_rank(), ranks, facts, _timeout())


def _megatrons_arguments() -> Mapping[str, Any]:
    """Return Megatron's arguments by name; none if Megatron's own training loop does not run."""
    args = training_global("_GLOBAL_ARGS")
    return {} if args is None else vars(args)


def _timeout() -> timedelta:
    """Return the timeout of torch's collectives over the world."""
    return timeout_of(dist.distributed_c10d._get_default_group())


def patience(timeout: timedelta) -> timedelta:
    """Return how long a start waits for the slowest rank; ``timeout`` is that of a collective."""
    return min(timeout, max(PATIENCE, timeout / 2))


def launch_facts(config: PipelineConfig) -> dict[str, Fact]:
    """Return the settings, files and versions of this rank that must be equal on all, by name."""
    facts = {
        flag(setting.name): Fact(_words(getattr(config, setting.name)))
        for setting in fields(config)
    }
    facts |= {f"the file {path}": _contents(path) for path in _files(config)}
    # The variable MEGATRON_EXT_ALLOW_UNKNOWN is compared because with it the first training step
    # runs also under Megatron's own function, on all ranks or on none.
    allowed = os.environ.get(ALLOW_UNKNOWN, "").strip()
    facts[ALLOW_UNKNOWN] = Fact("given" if allowed else "not given")
    versions = {
        # The version of megatron_ext is read from sys.modules, since the package itself imports
        # this module.
        "megatron_ext": sys.modules["megatron_ext"].__version__,
        # Megatron's version is compared without the git commit behind "+", which each rank reads
        # when it starts: the commit may change meanwhile, and a node may have no git. Patched
        # functions are compared by their source.
        "Megatron": megatron.core.__version__.partition("+")[0],
        "torch": torch.__version__,
    }
    return facts | {name: Fact(str(version)) for name, version in versions.items()}


def _words(value: object) -> str:
    if value is None or value is False:
        return "not given"
    if isinstance(value, range):
        return f"{value.start}:{value.stop}"
    # Paths are not compared: each rank may have a folder of its own.
    return "given" if value is True or isinstance(value, Path) else str(value)


def _files(config: PipelineConfig) -> Iterator[Path]:
    """Yield the files from which the schedule and its costs are read."""
    for spec in config.specs:
        if (schedule := file_of(spec)) is not None:
            yield schedule
    costs = config.costs
    if not costs.is_estimate and "=" not in costs.text:
        yield Path(costs.text)


def _contents(path: Path) -> Fact:
    try:
        contents, changed = path.read_bytes(), path.stat().st_mtime
    except OSError as error:
        return Fact(f"cannot be read: {error.strerror}")
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(changed))
    digest = hashlib.sha256(contents).hexdigest()
    return Fact(f"{len(contents)} bytes, changed {when}", digest)
