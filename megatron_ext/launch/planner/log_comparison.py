"""An estimate compared with what the log of the same training has measured: how far to trust a plan
made from that log."""

from __future__ import annotations

from megatron_ext.base.words import bytes_text
from megatron_ext.launch.command.log.log_figures import LogFigures
from megatron_ext.planner.candidate import RankMemory
from megatron_ext.planner.verdict import Alternative


def comparison_with_log(log: LogFigures, estimate: Alternative, ranks: int) -> str | None:
    """Return the times and memory in the ``log``, each next to its estimate, as text.

    Return None without any.

    Args:
        estimate: the estimate of the same command.
        ranks: world size.
    """
    texts = []
    if log.seconds is not None:
        texts.append(f"{log.seconds:.4g} s a step ({estimate.seconds:.4g} s estimated)")
    memory = estimate.candidate.memory
    if log.ranks:
        rank, measured = max(log.ranks.items(), key=lambda item: item[1].most)
        after_step, most = bytes_text(measured.after_step), bytes_text(measured.most)
        if memory is not None and rank < ranks:
            estimated = memory[rank * len(memory) // ranks]
            after_step += f" ({bytes_text(estimated.model.stored)} estimated)"
            most += f" ({bytes_text(_tensors(estimated))} estimated)"
        texts.append(f"rank {rank} held {after_step} after a step and {most} at the most")
    return f"measured in the log: {'; '.join(texts)}" if texts else None


def _tensors(memory: RankMemory) -> float:
    """Return the bytes of tensors in ``memory``, which is what torch's allocator counts."""
    return memory.total - memory.model.context
