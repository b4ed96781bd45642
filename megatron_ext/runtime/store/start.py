"""Keys of torch's store that belong to one start of a job's ranks.

torchrun starts failed ranks again with the same store. The store still has counts and reports of
the earlier start, whose ranks had reached different points. The ranks of one start therefore share
a name, which global rank 0 draws as they compare their settings.
"""

from __future__ import annotations

import torch.distributed as dist

_name = ""  # name of this start of the job; empty if the ranks have not compared settings


def begin_start(name: str) -> None:
    """Use ``name`` for this start of the job's ranks, which all of them share."""
    global _name
    _name = name


def keys_of_start(store: dist.Store) -> dist.Store:
    """Return ``store`` with a prefix for keys of the current start of the job only."""
    return dist.PrefixStore(f"megatron_ext/start {_name}", store) if _name else store
