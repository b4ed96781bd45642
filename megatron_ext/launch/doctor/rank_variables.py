"""Check that processes of a launch find their ranks where Megatron reads them.

Megatron reads RANK and WORLD_SIZE. If a launcher sets others, each process takes itself for a
training of one rank, and no error tells.
"""

from __future__ import annotations

from pathlib import Path

from megatron_ext.launch.command.launch_words import SHELL_SCRIPTS, Launch
from megatron_ext.launch.command.launchers import SLURM_RANK
from megatron_ext.launch.doctor.launch_report import Finding, Severity


def check_rank_variables(launch: Launch, script: str | None) -> list[Finding]:
    """Return a remark if nothing is seen to set RANK and WORLD_SIZE for the processes.

    Megatron would then take each process for a training of one rank.

    Args:
        script: text of the script; None if it cannot be read.
    """
    name = launch.rank_variable
    is_slurms = name == SLURM_RANK
    if not name or launch.world_size == 1 or (is_slurms and launch.installs):
        return []
    has_wrapper = any(Path(word).suffix in SHELL_SCRIPTS for word in launch.ignored)
    is_set = any("RANK=" in word for word in launch.words)
    if has_wrapper or is_set or (script is not None and name in script):
        return []
    text = f"Megatron reads RANK and WORLD_SIZE, and the launcher sets {name}"
    fix = "start torchrun on each node, or have a wrapper or the script set RANK, WORLD_SIZE and "
    fix += "LOCAL_RANK"
    if is_slurms:
        fix += "; or write -m megatron_ext before the script, which reads SLURM's variables"
    else:
        fix += "; -x sets what is the same for all ranks, as MASTER_ADDR"
    return [Finding(Severity.REMARK, "ranks", text, fix)]
