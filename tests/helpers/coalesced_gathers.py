"""Coalesced gathers of process groups, which must not reach gloo."""

from __future__ import annotations

from torch.distributed import ProcessGroup


def forbid_coalesced_gathers() -> None:
    """Let this rank fail where a coalesced gather begins."""
    names = [name for name in dir(ProcessGroup) if "gather" in name and "coalesced" in name]
    assert names
    for name in names:
        setattr(ProcessGroup, name, None)
