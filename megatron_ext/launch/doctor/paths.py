"""Check that the files exist that a launch command names.

A missing dataset, tokenizer or checkpoint ends a launch after its GPUs were waited for. The files
are looked for where the command names them; whether a checkpoint that is found would also load is
judged by `adapter.checkpoints`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.adapter.checkpoints.folder import (
    TRACKER,
    folder_name,
    is_iteration,
    iteration_in,
    loading_flag,
)
from megatron_ext.base.words import bytes_text
from megatron_ext.launch.doctor.launch_report import Finding, Severity

if TYPE_CHECKING:
    from megatron_ext.adapter.checkpoints.loading import LoadJudgement

# Header of an .idx file that megatron.core.datasets.indexed_dataset writes.
INDEX_HEADER = b"MMIDIDX\x00\x00"


def check_data(args: Any, prefixes: Sequence[str]) -> list[Finding]:
    """Return findings on whether ``prefixes`` are datasets, and the index cache can be written."""
    findings = [finding for prefix in prefixes for finding in _check_dataset(args, prefix)]
    if prefixes and all(finding.verdict is Severity.RIGHT for finding in findings):
        size = sum(Path(f"{prefix}.bin").stat().st_size for prefix in prefixes if not args.sft)
        text = f"{len(prefixes)} found, {bytes_text(size)}"
        findings = [Finding(Severity.RIGHT, "datasets", text)]
    if not prefixes and not args.mock_data:
        findings.append(
            Finding(
                Severity.REMARK,
                "datasets",
                "neither a dataset nor --mock-data is given",
                "right only where the script has data of its own",
            )
        )
    if args.data_cache_path is not None:
        findings.append(_check_folder("--data-cache-path", args.data_cache_path))
    return findings


def _check_dataset(args: Any, prefix: str) -> list[Finding]:
    if "://" in prefix:
        return [Finding(Severity.REMARK, "datasets", f"{prefix} is remote, and not looked for")]
    if args.sft:
        return [_exists("datasets", prefix)]
    findings = [_exists("datasets", f"{prefix}{ending}") for ending in (".bin", ".idx")]
    wrong = [finding for finding in findings if finding.verdict is Severity.WRONG]
    if wrong:
        if Path(prefix).is_file():
            fix = "drop the ending: a dataset is named without .bin and .idx"
            return [Finding(Severity.WRONG, "datasets", f"{prefix} is no dataset's prefix", fix)]
        return wrong
    with open(f"{prefix}.idx", "rb") as index:
        if index.read(len(INDEX_HEADER)) != INDEX_HEADER:
            fix = "write it anew with Megatron's tools/preprocess_data.py"
            text = f"{prefix}.idx is no index of Megatron's"
            return [Finding(Severity.WRONG, "datasets", text, fix)]
    return [Finding(Severity.RIGHT, "datasets", prefix)]


def check_tokenizer_files(args: Any) -> list[Finding]:
    """Return findings on whether the tokenizer's files exist; a name may be one of a model hub."""
    files = [path for path in (args.vocab_file, args.merge_file) if path is not None]
    findings = [_exists("tokenizer", path) for path in files]
    model = args.tokenizer_model
    if model is None:
        return findings
    may_be_name = args.tokenizer_type in ("HuggingFaceTokenizer", "SFTTokenizer")
    if not Path(model).exists() and may_be_name and not model.startswith((".", "/", "~")):
        text = f"{model} is no file here: it would come from the Hugging Face hub, or its cache"
        fix = "the ranks' nodes need a network or the cache; or give a folder"
        return [*findings, Finding(Severity.REMARK, "tokenizer", text, fix)]
    return [*findings, _exists("tokenizer", model)]


def check_checkpoints(
    args: Any, needed: float | None, judge: Callable[[str], LoadJudgement] | None = None
) -> list[Finding]:
    """Return findings on the checkpoints of a command: whether one loads, and others can be saved.

    Args:
        needed: bytes of one checkpoint; None if unknown.
        judge: returns the judgement of the checkpoint that a flag names; None if the arguments are
            not valid, and the checkpoint is only looked for.
    """
    findings = []
    # The pretrained checkpoint is loaded if there is no checkpoint to resume from.
    if args.pretrained_checkpoint is not None:
        flag = "--pretrained-checkpoint"
        pretrained = _check_load(flag, args.pretrained_checkpoint, None)
        is_loaded = loading_flag(args) == flag
        findings.append(_judged(pretrained, flag, judge if is_loaded else None))
    if args.load is not None:
        load = _judged(_check_load("--load", args.load, args.ckpt_step), "--load", judge)
        resumes = args.load == args.save and not args.exit_on_missing_checkpoint
        if load.verdict is Severity.WRONG and resumes and not (Path(args.load) / TRACKER).exists():
            text = f"nothing to load in {args.load} yet: this run starts from scratch"
            load = Finding(Severity.REMARK, "checkpoints", text)
        findings.append(load)
    if args.save is not None:
        findings.append(_check_save(args, needed))
    return findings


def _judged(found: Finding, flag: str, judge: Callable[[str], LoadJudgement] | None) -> Finding:
    """Return the finding on whether a checkpoint that was ``found`` loads, if it can be judged."""
    if judge is None or found.verdict is not Severity.RIGHT:
        return found
    made = judge(flag)
    verdict = {"does not load": Severity.WRONG, "not judged": Severity.REMARK}.get(
        made.outcome, Severity.REMARK if made.remark else Severity.RIGHT
    )
    text = f"{made.text}. {made.remark}" if made.remark else made.text
    return Finding(verdict, "checkpoints", text, made.fix)


def _check_load(flag: str, folder: str, step: int | None) -> Finding:
    if "://" in folder:
        return Finding(Severity.REMARK, "checkpoints", f"{flag} {folder} is remote, not looked for")
    tracker = Path(folder) / TRACKER
    if not Path(folder).is_dir():
        fix = "correct the path; Megatron would start from scratch"
        return Finding(Severity.WRONG, "checkpoints", f"{flag}: there is no folder {folder}", fix)
    if not tracker.is_file():
        text = f"{flag} {folder} has no {TRACKER}: Megatron would start from scratch"
        fix = "name the folder above that of an iteration"
        return Finding(Severity.WRONG, "checkpoints", text, fix)
    iteration = str(step) if step is not None else iteration_in(tracker)
    if not is_iteration(iteration):
        text = f"{tracker} says {iteration!r}, which is no iteration"
        return Finding(Severity.WRONG, "checkpoints", text, "write the last whole iteration there")
    name = folder_name(iteration)
    if not (tracker.parent / name).is_dir():
        text = f"{flag} {folder} has no {name}, which is to be loaded"
        iterations = ", ".join(sorted(path.name for path in tracker.parent.glob("iter_*"))[-3:])
        return Finding(Severity.WRONG, "checkpoints", text, f"there are: {iterations or 'none'}")
    return Finding(Severity.RIGHT, "checkpoints", f"{flag} {folder} has {name}")


def _check_save(args: Any, needed: float | None) -> Finding:
    folder = _check_folder("--save", args.save)
    if folder.verdict is not Severity.RIGHT or "://" in args.save:
        return folder
    free = shutil.disk_usage(_existing(Path(args.save))).free
    text = f"{folder.text}; {bytes_text(free)} free"
    if needed is None:
        return Finding(Severity.RIGHT, folder.subject, text)
    text += f", a checkpoint takes about {bytes_text(needed)}"
    if free < needed:
        return Finding(Severity.WRONG, folder.subject, text, "make room, or save elsewhere")
    return Finding(Severity.RIGHT, folder.subject, text)


def _check_folder(flag: str, folder: str) -> Finding:
    subject = "checkpoints" if flag == "--save" else "datasets"
    if "://" in folder:
        return Finding(Severity.REMARK, subject, f"{flag} {folder} is remote, and not looked for")
    parent = _existing(Path(folder))
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        text = f"{flag} {folder} cannot be written: {parent} is no folder that you may write"
        return Finding(Severity.WRONG, subject, text, "name another folder")
    exists = "is there" if parent == Path(folder).absolute() else "can be made"
    return Finding(Severity.RIGHT, subject, f"{flag} {folder} {exists}")


def _existing(path: Path) -> Path:
    """Return the nearest existing folder among ``path`` and its parents."""
    path = path.absolute()
    return next(p for p in (path, *path.parents) if p.exists())


def _exists(subject: str, path: str) -> Finding:
    if not Path(path).exists():
        return Finding(Severity.WRONG, subject, f"there is no {path}", "correct the path")
    if not os.access(path, os.R_OK):
        return Finding(
            Severity.WRONG, subject, f"{path} cannot be read", "get the right to read it"
        )
    return Finding(Severity.RIGHT, subject, f"{path} is there")
