"""Train a small GPT on real text under a schedule of megatron_ext; scripts/quickstart.sh calls it.

Settings come from the environment (NPROC, SCHEDULE, ITERS) and any Megatron flags on the command
line, which override the ones below. The full log goes to a file; here are a progress line and a
summary.
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.registry import choose
from megatron_ext.observe.program_summary import stock_1f1b
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.problem import Problem
from megatron_ext.viz.draw import draw

REPOSITORY = Path(__file__).resolve().parents[1]
RUNS = REPOSITORY / "runs" / "quickstart"
TEXT = RUNS / "stdlib"
TOKENS = 4_000_000  # number of tokens of the text; an iteration reads 2,048 tokens

# The model is so small, and learns so fast, that the loss halves within about a minute on two
# cores.
MODEL = {
    "--num-layers": "8",
    "--hidden-size": "128",
    "--num-attention-heads": "4",
    "--seq-length": "128",
    "--max-position-embeddings": "128",
    "--micro-batch-size": "2",
    "--global-batch-size": "16",
    "--lr": "2e-3",
    "--min-lr": "2e-4",
    "--lr-warmup-fraction": "0.05",
    "--lr-decay-style": "cosine",
    "--clip-grad": "1.0",
    "--attention-dropout": "0",
    "--hidden-dropout": "0",
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": "257",
    "--data-path": str(TEXT),
    "--split": "99,1,0",
    "--eval-iters": "2",
    "--eval-interval": "1000",
    "--num-workers": "0",
    "--log-interval": "1",
}

ITERATION = re.compile(
    r"iteration +(\d+)/ +(\d+) .*elapsed time per iteration \(ms\): ([\d.]+).*"
    r"global batch size: +(\d+) .*lm loss: ([\d.E+-]+)"
)
# Pattern of the costs in a logged prediction. A range such as 0.1..0.2, for ranks that differ, does
# not match.
PREDICTION = re.compile(r"megatron_ext: .* (\d+) microbatch(?:es)?: .*: (f=(?!\S*\.\.)\S+)")
FAILURE = re.compile(
    r"^(\[rank\d+\]: )?[\w.]*(?<!ChildFailed)(Error|Failure)\b"
    r"|megatron_ext: (error|got)|\(SIGKILL\)"
)

console = Console(soft_wrap=True)


@dataclass(frozen=True)
class Iteration:
    """An iteration as a line of Megatron's log reports it."""

    number: int
    of: int
    seconds: float
    batch: int
    loss: float


def main() -> None:
    ranks = int(os.environ.get("NPROC", "4"))
    schedule = os.environ.get("SCHEDULE", "zb-h1")
    iterations = os.environ.get("ITERS", "40")
    RUNS.mkdir(parents=True, exist_ok=True)
    prepare_text()
    flags = {**MODEL, "--train-iters": iterations, "--pipeline-model-parallel-size": str(ranks)}
    if schedule:
        flags["--pipeline-schedule"] = schedule
    command = launch_command(
        ranks, [word for item in flags.items() for word in item] + sys.argv[1:]
    )
    log = RUNS / "train.log"
    console.print(f"training on {ranks} ranks under {schedule or 'stock Megatron'}; log: {log}")
    done, prediction = train(command, log)
    summarise(done, prediction, schedule, ranks, sequence_length([*command]))


def prepare_text() -> None:
    """Make the dataset if it does not exist. If another process is making it, wait for that."""
    with TEXT.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if TEXT.with_suffix(".idx").exists():
            return
        console.print(
            f"preparing text: {TOKENS / 1e6:.0f} million bytes of Python's standard library, "
            "a token a byte"
        )
        folder = sysconfig.get_path("stdlib")
        script = REPOSITORY / "scripts" / "prepare_text.py"
        subprocess.run(
            [
                *(sys.executable, script, folder, "--output", TEXT),
                *("--suffix", ".py", "--tokens", str(TOKENS)),
            ],
            check=True,
            # The output of prepare_text says how to train on the text, which the quick start does
            # itself, so it is hidden.
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
        )


def launch_command(ranks: int, flags: Sequence[str]) -> list[str]:
    """Return the launch command that a user of one machine would type."""
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    script = str(REPOSITORY / "scripts" / "pretrain_gpt.py")
    return [
        *torchrun,
        *("--standalone", "--nproc-per-node", str(ranks)),
        *("-m", "megatron_ext", script),
        *flags,
    ]


def train(command: list[str], log: Path) -> tuple[list[Iteration], re.Match[str] | None]:
    """Run ``command`` and show its progress. If it fails, print the end of the log and exit."""
    done: list[Iteration] = []
    prediction = None
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting the ranks", total=None, state="")
        for line in run(command, log):
            prediction = PREDICTION.search(line) or prediction
            if match := ITERATION.search(line):
                step = Iteration(
                    int(match[1]),
                    int(match[2]),
                    float(match[3]) / 1e3,
                    int(match[4]),
                    float(match[5]),
                )
                done.append(step)
                state = f"loss {step.loss:.3f}, {seconds_left(done):.0f} s left"
                progress.update(
                    task, description="training", total=step.of, completed=step.number, state=state
                )
                if not console.is_terminal and step.number % max(step.of // 10, 1) == 0:
                    console.print(f"iteration {step.number}/{step.of}  {state}")
    if not done:
        console.print("no iteration ended; the last lines of the log:")
        fail(log)
    return done, prediction


def seconds_left(done: Sequence[Iteration]) -> float:
    """Return the seconds that the remaining iterations take, at the pace of the last ten.

    The first iteration is ignored if there are others, as it includes work that is done once.
    """
    recent = done[1:][-10:] or done
    return (done[-1].of - done[-1].number) * sum(step.seconds for step in recent) / len(recent)


def run(command: list[str], log: Path) -> Iterator[str]:
    """Yield the lines that ``command`` prints, and write them to the file ``log`` too."""
    started = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # Without a visible GPU the four ranks use gloo, even on a machine with GPUs.
            env={**os.environ, "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""},
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                file.write(line)
                yield line.rstrip()
            process.wait()
        except KeyboardInterrupt:
            process.wait()  # torchrun gets the same Ctrl-C, and ends its ranks
            raise SystemExit(130) from None
    if process.returncode:
        console.print(f"training failed after {time.monotonic() - started:.0f} s:")
        fail(log)


def fail(log: Path) -> None:
    """Print the lines of the log that tell most about an error, and exit."""
    lines = log.read_text(errors="replace").splitlines()
    # The line before each error is shown, too, since an AssertionError alone says nothing.
    errors = [
        line
        for before, error in pairwise(lines)
        if FAILURE.search(error)
        for line in (before, error)
    ]
    for line in errors[:8] or lines[-20:]:
        console.print(f"  {line}", markup=False, highlight=False)
    console.print(f"the whole log: {log}")
    raise SystemExit(1)


def sequence_length(words: list[str]) -> int:
    """Return the value of the last --seq-length in ``words``, as argparse takes it."""
    last = max(index for index, word in enumerate(words) if word.startswith("--seq-length"))
    return int(words[last].partition("=")[2] or words[last + 1])


def summarise(
    done: list[Iteration],
    prediction: re.Match[str] | None,
    schedule: str,
    ranks: int,
    sequence: int,
) -> None:
    """Print the loss, the speed, and the bubble that is predicted for GPUs with the same costs."""
    steady = done[len(done) // 5 :]
    tokens = sum(step.batch * sequence for step in steady) / sum(step.seconds for step in steady)
    console.print(f"\nloss              {done[0].loss:.3f} -> {done[-1].loss:.3f}")
    console.print(f"tokens per second {tokens:.0f}")
    if prediction is None:
        return
    resolved = choose(schedule)
    placement = resolved.place(ranks)
    problem = Problem(placement, int(prediction[1]), parse_costs(prediction[2], placement))
    timeline = simulate(build_program(resolved, problem), problem.costs)
    stock = stock_1f1b(problem)
    picture = RUNS / "timeline.svg"
    draw([stock, timeline], picture)
    console.print(
        f"predicted bubble  {timeline.bubble_share_makespan:.1%} of a step "
        f"(1f1b: {stock.bubble_share_makespan:.1%})"
    )
    console.print(f"timeline          {picture}")


if __name__ == "__main__":
    main()
