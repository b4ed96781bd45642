"""State that a training keeps when its ranks are started again."""

from __future__ import annotations

from typing import Any

from megatron_ext.doctor.report import Finding, Severity


def check_restarts(args: Any, max_restarts: int) -> list[Finding]:
    """Check that ranks which the launcher starts again, up to ``max_restarts`` times, continue from
    a checkpoint. They are new processes, and have nothing else of the old ones."""
    if not max_restarts:
        return []
    text = f"up to {max_restarts}, each with new processes on all ranks"
    if args.save is None:
        text += ": without --save each begins at iteration 0"
        fix = "add --save FOLDER --save-interval N --load FOLDER"
        return [Finding(Severity.REMARK, "restarts", text, fix)]
    if args.load != args.save:
        begins = "at iteration 0" if args.load is None else f"from {args.load}"
        text += f": each begins {begins}, not from what this run has saved"
        return [Finding(Severity.REMARK, "restarts", text, f"write --load {args.save}")]
    return [Finding(Severity.RIGHT, "restarts", f"{text}, from the last checkpoint in {args.save}")]
