"""What is left of a training when its ranks are started again."""

from __future__ import annotations

from typing import Any

from megatron_ext.doctor.report import Finding, Verdict


def check_restarts(args: Any, max_restarts: int) -> list[Finding]:
    """Whether ranks that the launcher starts again, up to ``max_restarts`` times, go on where they
    were. They are new processes: nothing but a checkpoint is left of the old ones."""
    if not max_restarts:
        return []
    text = f"up to {max_restarts}, each with new processes on all ranks"
    if args.save is None:
        text += ": without --save each begins at iteration 0"
        fix = "add --save FOLDER --save-interval N --load FOLDER"
        return [Finding(Verdict.REMARK, "restarts", text, fix)]
    if args.load != args.save:
        begins = "at iteration 0" if args.load is None else f"from {args.load}"
        text += f": each begins {begins}, not from what this run has saved"
        return [Finding(Verdict.REMARK, "restarts", text, f"write --load {args.save}")]
    return [Finding(Verdict.RIGHT, "restarts", f"{text}, from the last checkpoint in {args.save}")]
