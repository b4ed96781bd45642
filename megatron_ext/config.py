"""PipelineConfig: the one place a setting is declared. Flags and `install` come from it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path

from megatron_ext.schedule.build.registry import Choice, choose
from megatron_ext.schedule.problem import P2P, Offload, VocabularyParallel

ESTIMATE = "estimate"
PLAN = "plan"
PROFILE = "profile"
COSTS_FILE = "costs.json"  # what is written where no path is given, in the working directory

_VARIABLES = "MEGATRON_EXT_"

# Patch a Megatron whose sources the patches were not read against: no setting of a run.
ALLOW_UNKNOWN = f"{_VARIABLES}ALLOW_UNKNOWN"


def _setting(default: str | None, metavar: str, text: str) -> str | None:
    setting: str | None = field(default=default, metadata={"metavar": metavar, "help": text})
    return setting


def _switch(text: str) -> bool:
    switch: bool = field(default=False, metadata={"help": text})
    return switch


@dataclass(frozen=True)
class PipelineConfig:
    """The pipeline settings of a run, as the user wrote them.

    A field ``x`` is the flag ``--pipeline-x``, the keyword ``x`` of `megatron_ext.install` and, for
    `megatron_ext.auto`, the variable ``MEGATRON_EXT_X``.
    """

    schedule: str | None = _setting(
        None,
        "SPEC",
        "Pipeline schedule: NAME[:key=value,...] (see 'megatron-ext schedules'), a CSV file of "
        "compute actions, a row per rank, a Python file with a family, or 'plan', which chooses "
        "one for this launch. Default: Megatron's own, untouched.",
    )
    memory_limit: str | None = _setting(
        None,
        "LIMIT",
        "What a rank's activations may take: 5 (microbatches of a rank), 0.5x (of 1F1B's peak) or "
        "60GiB. Default: no limit.",
    )
    costs: str | None = _setting(
        ESTIMATE,
        "COSTS",
        "What passes cost: a JSON file, f=10,i=12,w=8,comm=1 (per microbatch of a rank; comm per "
        "hop), 'estimate' from the model's dimensions (the default), or 'profile' or "
        "'profile:FILE' to measure them in the first iterations, write them to FILE (costs.json) "
        "and use them.",
    )
    p2p: str | None = _setting(
        P2P.ASYNC.value,
        "{async,batched}",
        "How ranks exchange tensors: async makes a process group for each channel (the default), "
        "batched makes none and uses the pipeline's own, where many communicators cost too much.",
    )
    vocab_parallel: str | None = _setting(
        VocabularyParallel.NONE.value,
        "{none,1,2}",
        "Divide embedding and output layer over all pipeline ranks, and make their passes part of "
        "the schedule: 1 holds two microbatches more than without, 2 one. Default: none, they are "
        "on the first and the last stage.",
    )
    activation_offload: str | None = _setting(
        Offload.NONE.value,
        "{none,half,full,fit}",
        "Copy activations to host memory until they are needed, on the schedule's own time: half "
        "is the longer-lived half of a rank's chunks, full all that the link is quick enough for, "
        "fit the fewest that meet --pipeline-memory-limit. Default: none.",
    )
    post_validation: bool = _switch(
        "Let steps overlap: the optimizer steps before the whole gradient norm is known, which "
        "comes during the next step's warm-up, and where that step should have been clipped or "
        "skipped it is taken back and done again, exactly."
    )
    report_split: bool = _switch(
        "After the first step, print for each rank of the first pipeline what share of the weight "
        "gradients the schedule puts off, and what comes with the input gradients and why."
    )
    trace: str | None = _setting(
        None,
        "DIR",
        "Write DIR/trace.json for Perfetto: when each pass ran on each rank of the last pipeline, "
        "beside the prediction. Wants --pipeline-trace-iters. See 'megatron-ext trace DIR'.",
    )
    trace_iters: str | None = _setting(
        None,
        "A:B",
        "The training iterations to trace: A to B-1, as Megatron's log counts them.",
    )

    def __post_init__(self) -> None:
        if self.schedule is None:
            given = [f for f in fields(self) if getattr(self, f.name) != f.default]
            if given:
                value = getattr(self, given[0].name)
                words = flag(given[0].name) + ("" if value is True else f" {value}")
                raise ValueError(
                    f"{words} is given without {flag('schedule')}: it acts on a schedule of ours "
                    f"only; add one or drop it"
                )
        else:
            if self.schedule != PLAN:
                self.choice()
            messages = self.messages()
            divided = self.vocabulary() is not VocabularyParallel.NONE
            if divided and messages is P2P.BATCHED:
                raise ValueError(
                    f"{flag('p2p')} batched does not go with {flag('vocab_parallel')} "
                    f"{self.vocab_parallel}: collectives have communicators of their own; drop one"
                )
            self._check_offload()
            self._check_post_validation()
            self.traced_iterations()
            self.profile()

    def _check_offload(self) -> None:
        way = self.offload()
        if way is Offload.FIT and self.memory_limit is None:
            raise ValueError(
                f"{flag('activation_offload')} {way} has nothing to fit into: add "
                f"{flag('memory_limit')}, or write {Offload.FULL} or {Offload.HALF}"
            )
        if way is not Offload.NONE and "=" in (self.costs or "") and "d2h=" not in str(self.costs):
            raise ValueError(
                f"{flag('activation_offload')} {way} needs to know how long copies to the host "
                f"take: add d2h= and h2d= to {flag('costs')} {self.costs} (seconds per microbatch "
                f"of a rank), or drop {flag('costs')} for an estimate"
            )

    def _check_post_validation(self) -> None:
        if not self.post_validation:
            return
        beside = {
            "p2p": (self.messages() is P2P.BATCHED, "its messages are not part of batches"),
            "vocab_parallel": (
                self.vocabulary() is not VocabularyParallel.NONE,
                "passes of the vocabulary wait for all ranks before a verdict has come",
            ),
            "activation_offload": (
                self.offload() is not Offload.NONE,
                "what has left for the host cannot be dropped",
            ),
            "costs": (
                self.profile() is not None,
                "steps that overlap cannot be measured one by one; profile without it, and give "
                "it the file that was written",
            ),
        }
        for name, (is_given, why) in beside.items():
            if is_given:
                raise ValueError(
                    f"{flag('post_validation')} does not go with {flag(name)} "
                    f"{getattr(self, name)}: {why}"
                )

    def choice(self) -> Choice:
        """The chosen schedule. Raises ValueError when there is no such schedule, or none yet."""
        assert self.schedule is not None
        if self.schedule == PLAN:
            raise ValueError(
                f"the schedule {PLAN!r} is chosen from a launch line: launch with python -m "
                f"megatron_ext SCRIPT ..., or name one; 'megatron-ext plan' tells which"
            )
        return choose(self.schedule)

    def messages(self) -> P2P:
        """How messages share communicators. Raises ValueError when there is no such way."""
        if self.p2p not in list(P2P):
            raise ValueError(f"{flag('p2p')} {self.p2p}: write {' or '.join(P2P)}")
        return P2P(self.p2p)

    def traced_iterations(self) -> range:
        """The training iterations to trace, none without a folder for the trace.

        Raises ValueError when there is no telling which, or where to.
        """
        if self.trace is None and self.trace_iters is None:
            return range(0)
        example = f"write {flag('trace')} DIR {flag('trace_iters')} 10:12 to trace 10 and 11"
        if self.trace is None:
            raise ValueError(f"{flag('trace_iters')} has no folder to write to; {example}")
        if self.trace_iters is None:
            raise ValueError(f"{flag('trace')} does not say which iterations; {example}")
        first, _, end = self.trace_iters.partition(":")
        if not (first.isdecimal() and end.isdecimal() and 1 <= int(first) < int(end)):
            raise ValueError(
                f"{flag('trace_iters')} {self.trace_iters} is no A:B with 1 <= A < B; {example}"
            )
        return range(int(first), int(end))

    def profile(self) -> Path | None:
        """Where measured costs are written to; None where none are measured.

        Raises ValueError when that is an empty path.
        """
        way, colon, path = (self.costs or "").partition(":")
        if way != PROFILE:
            return None
        if colon and not path:
            raise ValueError(
                f"{flag('costs')} {self.costs} names no file: write {PROFILE}:FILE, or {PROFILE} "
                f"for {COSTS_FILE} in the working directory"
            )
        return Path(path or COSTS_FILE)

    def estimates(self) -> bool:
        """Whether the run begins with costs estimated from the model's dimensions."""
        return self.costs is None or self.costs == ESTIMATE or self.profile() is not None

    def vocabulary(self) -> VocabularyParallel:
        """How the vocabulary is divided. Raises ValueError when there is no such way."""
        ways = list(VocabularyParallel)
        if self.vocab_parallel not in ways:
            raise ValueError(
                f"{flag('vocab_parallel')} {self.vocab_parallel}: write {', '.join(ways[:-1])} or "
                f"{ways[-1]}"
            )
        return VocabularyParallel(self.vocab_parallel)

    def offload(self) -> Offload:
        """Which activations leave for the host. Raises ValueError when there is no such way."""
        if self.activation_offload not in list(Offload):
            raise ValueError(
                f"{flag('activation_offload')} {self.activation_offload}: write "
                f"{', '.join(list(Offload)[:-1])} or {list(Offload)[-1]}"
            )
        return Offload(self.activation_offload)


def flag(name: str) -> str:
    """The flag of the setting ``name``."""
    return f"--pipeline-{name.replace('_', '-')}"


def variable(name: str) -> str:
    """The environment variable of the setting ``name``."""
    return _VARIABLES + name.upper()


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Declare our flags, in their own group, on ``parser``."""
    group = parser.add_argument_group("megatron_ext", "pipeline schedules of megatron_ext")
    for setting in fields(PipelineConfig):
        named = {"dest": f"pipeline_{setting.name}", "help": setting.metadata["help"]}
        if setting.default is False:
            group.add_argument(flag(setting.name), action="store_true", **named)
        else:
            metavar = setting.metadata["metavar"]
            group.add_argument(
                flag(setting.name), default=setting.default, metavar=metavar, **named
            )
    return parser


def from_arguments(arguments: argparse.Namespace) -> PipelineConfig:
    """The settings in a parsed command line."""
    return PipelineConfig(
        **{f.name: getattr(arguments, f"pipeline_{f.name}") for f in fields(PipelineConfig)}
    )


def from_argv(argv: Sequence[str]) -> PipelineConfig:
    """The settings in a script's command line, whatever else is in it."""
    parser = add_flags(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    return from_arguments(parser.parse_known_args(argv)[0])


def settings_given(argv: Sequence[str]) -> bool:
    """Whether one of our flags is in a script's command line."""
    flags = {flag(setting.name) for setting in fields(PipelineConfig)}
    return any(word.split("=")[0] in flags for word in argv)


def from_environment(env: Mapping[str, str]) -> PipelineConfig:
    """The settings in environment variables, for `megatron_ext.auto`. An empty one is not given.

    Raises:
        ValueError: there is no schedule among them, a variable ``MEGATRON_EXT_*`` is no setting, or
            a setting is not understood.
    """
    settings = {variable(setting.name): setting for setting in fields(PipelineConfig)}
    given = {name: value for name, value in env.items() if name.startswith(_VARIABLES) and value}
    for name in sorted(given.keys() - settings.keys() - {ALLOW_UNKNOWN}):
        raise ValueError(f"{name} is no setting: write one of {', '.join(settings)}")
    if variable("schedule") not in given:
        raise ValueError(
            f"{variable('schedule')} is not set: export {variable('schedule')}=zb-h1, or another "
            f"of 'megatron-ext schedules', or do not import megatron_ext.auto"
        )
    values = {
        setting.name: _value(setting, given[name])
        for name, setting in settings.items()
        if name in given
    }
    try:
        return PipelineConfig(**values)  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"in {_VARIABLES}* (--pipeline-x is {variable('x')}): {error}") from error


def _value(setting: Field[object], text: str) -> str | bool:
    if setting.default is not False:
        return text
    if text not in ("0", "1"):
        raise ValueError(f"{variable(setting.name)}={text}: write 1, or 0 for its default")
    return text == "1"
