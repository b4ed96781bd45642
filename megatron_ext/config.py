"""Declaration of all settings: flags, variables and `install` follow `PipelineConfig`.

One declaration serves all ways to write a setting, so that they cannot differ. It needs no torch:
commands and the launcher read settings before torch is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

from megatron_ext.base.setting import (
    as_given,
    enumerated,
    flag,
    flag_with_value,
    setting,
    switch,
)
from megatron_ext.compile.auto_spec import is_open
from megatron_ext.compile.contestants import Contestants, RaceThen
from megatron_ext.compile.feature_settings import (
    DECLARED,
    FEATURES,
    NAMING_SCHEDULES,
    WATCHING_STOCK,
    SharedPrompts,
    setting_of,
    settings_of_options,
)
from megatron_ext.compile.registry import ResolvedSpec, choose
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.dealing import MicrobatchOrder
from megatron_ext.schedule.limit import parse_limit
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import (
    P2P,
    Offload,
    Problem,
    Recompute,
    ScheduleOptions,
    VocabularyParallel,
    parse_recompute,
)
from megatron_ext.schedule.rank_speeds import RankSpeeds, parse_rank_speeds
from megatron_ext.schedule.slices import Lengths, Slices, parse_lengths

ESTIMATE = "estimate"
PLAN = "plan"
PROFILE = "profile"
COSTS_FILE = "costs.json"  # default name of the file of measured costs

VARIABLES = "MEGATRON_EXT_"
PREFIX = "pipeline_"  # prefix of megatron_ext's settings among Megatron's arguments

# Environment variable that permits patches on a Megatron whose sources are unknown. It is not a
# setting of a run.
ALLOW_UNKNOWN = f"{VARIABLES}ALLOW_UNKNOWN"


# Megatron's flag for overlapped passes, which is the only schedule option that no setting of
# megatron_ext requests.
OVERLAP = "--overlap-moe-expert-parallel-comm"


def variable(name: str) -> str:
    """Return the environment variable of the setting ``name``."""
    return VARIABLES + name.upper()


@dataclass(frozen=True)
class CostsSource:
    """Source of the costs of passes, as a user names it.

    Attributes:
        text: as the user wrote it.
        profile: file for measured costs; None if none are measured.
    """

    text: str
    profile: Path | None = None

    def __str__(self) -> str:
        return self.text

    @property
    def is_estimate(self) -> bool:
        """Whether the run begins with costs estimated from the model's dimensions."""
        return self.text == ESTIMATE or self.profile is not None

    @property
    def file(self) -> Path | None:
        """Costs file with which the run begins; None without one."""
        return None if self.is_estimate or "=" in self.text else Path(self.text)

    @property
    def in_seconds(self) -> bool:
        """Whether the costs are seconds, and not in a unit of the user's own."""
        return self.is_estimate or self.file is not None


SliceLengths = Lengths | tuple[int, ...]


def _source(name: str, text: str) -> CostsSource:
    method, _, path = text.partition(":")
    return CostsSource(text, Path(path or COSTS_FILE) if method == PROFILE else None)


def _recompute(name: str, text: str) -> Recompute:
    return parse_recompute(text, flag(name))


def _count(name: str, given: object) -> int:
    text = str(given)
    if not (text.isdecimal() and int(text)):
        raise ValueError(f"{flag(name)} {text}: write a number from 1 on")
    return int(text)


def _slice_lengths(name: str, text: str) -> SliceLengths:
    return parse_lengths(text, flag(name))


def _rank_speeds(name: str, text: str) -> RankSpeeds:
    return parse_rank_speeds(text, flag(name))


def _limit(name: str, text: str) -> str:
    try:
        # Only the form of the limit is checked here, as a share of 1F1B's memory depends on the
        # job's sizes.
        parse_limit(text, 1, 1)
    except ValueError as error:
        raise ValueError(f"{flag(name)}: {error}") from None
    return text


@dataclass(frozen=True)
class PipelineConfig:
    """Pipeline settings of a run.

    A field ``x`` is the flag ``--pipeline-x``, the keyword ``x`` of `megatron_ext.install` and the
    variable ``MEGATRON_EXT_X``. `parse` creates the config from what users write.

    Raises ValueError for an unknown schedule, and for conflicting settings.
    """

    schedule: str | None = field(
        default=None,
        metadata=setting(
            as_given,
            "SPEC",
            "Pipeline schedule: NAME[:key=value,...] ('megatron-ext schedules' lists names), a CSV "
            "file of compute actions with a row per rank, a Python file with a family, auto or "
            "plan. auto chooses placement, chunks and order of passes for this launch "
            "(auto:placement=v,chunks=2 fixes the first two). plan compares all schedules, with "
            "and without vocabulary parallelism. Default: Megatron's own, unpatched.",
        ),
    )
    memory_limit: str | None = field(
        default=None,
        metadata=setting(
            _limit,
            "LIMIT",
            "Most activations that a rank may store: 5 (those of 5 microbatches in all its "
            "stages), 0.5x (half of 1F1B's peak) or 60GiB. Default: no limit.",
        ),
    )
    costs: CostsSource = field(
        default=CostsSource(ESTIMATE),
        metadata=setting(
            _source,
            "COSTS",
            "Costs for which the schedule is made: estimate, profile, profile:FILE, FILE, or "
            "times. estimate (the default) takes them from the model's dimensions. profile "
            "measures them in the first iterations, writes FILE (costs.json in the folder of "
            "--save, else of --pipeline-trace, else in the working directory), and rebuilds the "
            "schedule. FILE is such a file. Times are in any unit: f=10,i=12,w=8,comm=1 are "
            "forward pass, input gradient and weight gradient of a microbatch on one rank, and one "
            "message.",
        ),
    )
    rank_speeds: RankSpeeds | None = field(
        default=None,
        metadata=setting(
            _rank_speeds,
            "S,S,...",
            "Speed of each pipeline rank relative to the costs: with 1,1,0.77,1 rank 2 takes 1.3 "
            "times as long as its costs say. Schedules that depend on costs are made for these "
            "speeds. Default: 1 for all ranks.",
        ),
    )
    p2p: P2P = field(
        default=P2P.ASYNC,
        metadata=enumerated(
            P2P,
            "Communicators for messages: async (the default) creates a process group for each pair "
            "of neighbouring ranks, direction and kind of message. batched uses Megatron's group "
            "of the pipeline, for clusters where communicators take too much memory or too many "
            "multiprocessors.",
        ),
    )
    vocab_parallel: VocabularyParallel = field(
        default=VocabularyParallel.NONE, metadata=DECLARED["vocab_parallel"]
    )
    activation_offload: Offload = field(
        default=Offload.NONE, metadata=DECLARED["activation_offload"]
    )
    recompute: Recompute = field(
        default=Recompute(),
        metadata=setting(
            _recompute,
            "{none,fit,first:N}",
            "Activations to recompute before their backward pass, in a bubble if there is one: "
            "none (the default), fit or first:N. Until then only their stage's input is stored. "
            "fit recomputes as few as meet --pipeline-memory-limit, or what makes the step "
            "shortest within it if the schedule is a search, first:N those of the model's first N "
            "stages, which wait longest.",
        ),
    )
    slices: int = field(
        default=1,
        metadata=setting(
            _count,
            "K",
            "Number of slices into which each sequence is cut. Slices go through the pipeline one "
            "after the other, and each attends to the earlier slices. With long sequences in few "
            "microbatches, bubbles and activation memory fall by a factor of about K. Default: 1, "
            "whole sequences.",
        ),
    )
    slice_lengths: SliceLengths = field(
        default=Lengths.EVEN,
        metadata=setting(
            _slice_lengths,
            "{even,balanced,N,N,...}",
            "Lengths of the slices: even (the default), balanced (equal work: later slices are "
            "shorter, as they attend to more), or token counts such as 4096,2048,1024,1024.",
        ),
    )
    join_slice_weights: bool = field(
        default=False,
        metadata=switch(
            "Compute each weight's gradient once for all slices of a microbatch, after the last of "
            "their input gradients. Otherwise weights' gradients are read and written for every "
            "slice, which short slices and many experts make slow. What W needs is held longer. "
            "Requires --pipeline-slices and a schedule that splits the backward pass."
        ),
    )
    post_validation: bool = field(default=False, metadata=DECLARED["post_validation"])
    microbatch_order: MicrobatchOrder = field(
        default=MicrobatchOrder.ARRIVAL, metadata=DECLARED["microbatch_order"]
    )
    deal_microbatches: bool = field(default=False, metadata=DECLARED["deal_microbatches"])
    microbatch_weights: Path | None = field(default=None, metadata=DECLARED["microbatch_weights"])
    report_split: bool = field(default=False, metadata=DECLARED["report_split"])
    metrics: bool = field(default=False, metadata=DECLARED["metrics"])
    trace: Path | None = field(default=None, metadata=DECLARED["trace"])
    trace_iters: range | None = field(default=None, metadata=DECLARED["trace_iters"])
    race: Contestants | None = field(default=None, metadata=DECLARED["race"])
    race_then: RaceThen = field(default=RaceThen.WINNER, metadata=DECLARED["race_then"])
    shared_prompts: SharedPrompts = field(
        default=SharedPrompts.NONE, metadata=DECLARED["shared_prompts"]
    )

    @classmethod
    def parse(cls, **settings: str | bool | float | Path | None) -> PipelineConfig:
        """Return the config of the settings that a user wrote; None stands for a default.

        Raises:
            TypeError: there is no such setting.
            ValueError: a setting cannot be parsed, or the config itself refuses the settings.
        """
        declared = {setting.name: setting for setting in fields(cls)}
        for name in settings.keys() - declared.keys():
            raise TypeError(f"there is no setting {name!r}: write one of {', '.join(declared)}")
        texts = {
            name: _as_text(declared[name], value)
            for name, value in settings.items()
            if value is not None
        }
        given = {
            name: texts[name]
            for name, setting in declared.items()
            if texts.get(name) not in (None, default_text(setting))
        }
        if not given.keys() & {*NAMING_SCHEDULES}:
            for name, value in given.items():
                if not is_on_stock(declared[name]):
                    raise ValueError(
                        f"{flag_with_value(name, value)} is given without {flag('schedule')}: the "
                        f"flag acts only on a schedule of megatron_ext; add {flag('schedule')}, "
                        f"or drop {flag(name)}"
                    )
        parsed = {n: declared[n].metadata["parse"](n, value) for n, value in given.items()}
        if not _is_chosen_later(parsed.get("schedule")):
            for feature in FEATURES:
                parsed |= feature.completed(parsed)
        return cls(**parsed)

    def __post_init__(self) -> None:
        self._check_features(on_stock=True)
        if self.schedule is None:
            return
        if not self.is_chosen_later:
            _ = self.resolved_spec
        self._check_slices()
        self._check_features(on_stock=False)
        if self.recompute.fit and self.memory_limit is None:
            raise ValueError(
                f"{flag('recompute')} {self.recompute} recomputes as much as a memory limit "
                f"requires, and there is none: add {flag('memory_limit')}, or write first:N"
            )
        if (conflict := self.options.conflict) is not None:
            first, second = map(setting_of, conflict.options)
            raise ValueError(conflict.text(self._as_written(first), self._as_written(second)))

    def _check_features(self, *, on_stock: bool) -> None:
        for feature in FEATURES:
            if feature.acts_on_stock == on_stock:
                feature.check(self)

    def _check_slices(self) -> None:
        lengths = self.slice_lengths
        if isinstance(lengths, tuple) and len(lengths) != self.slices:
            tokens = ",".join(map(str, lengths))
            raise ValueError(
                f"{flag('slice_lengths')} {tokens} has {len(lengths)} lengths, and "
                f"{flag('slices')} is {self.slices}: give as many lengths as slices"
            )
        if self.slices == 1 and lengths is not Lengths.EVEN:
            raise ValueError(
                f"{flag('slice_lengths')} {lengths} is given without {flag('slices')}: sequences "
                f"are not cut; add {flag('slices')} K, or drop {flag('slice_lengths')}"
            )
        if self.slices == 1 and self.join_slice_weights:
            raise ValueError(
                f"{flag('join_slice_weights')} is given without {flag('slices')}: sequences are "
                f"not cut; add {flag('slices')} K, or drop {flag('join_slice_weights')}"
            )

    def _as_written(self, name: str) -> str:
        return flag_with_value(name, getattr(self, name))

    @property
    def watches_stock(self) -> bool:
        """Whether Megatron's own pipeline runs and is observed."""
        return self.schedule is None and any(getattr(self, name) for name in WATCHING_STOCK)

    @property
    def changes_launch(self) -> bool:
        """Whether a launch with these settings is patched."""
        of_stock = (given for given in fields(self) if is_on_stock(given))
        return self.schedule is not None or any(
            getattr(self, given.name) != given.default for given in of_stock
        )

    @property
    def effect_on_stock(self) -> str:
        """Effect of these settings on Megatron's own schedule, in words."""
        if self.watches_stock:
            return "is watched"
        if self.arranges_microbatches:
            return "its microbatches are arranged"
        return "prompts that its callers describe are computed once"

    @property
    def arranges_microbatches(self) -> bool:
        """Whether microbatches are read in another order, or on another replica, than stock's."""
        return self.deal_microbatches or self.microbatch_order is not MicrobatchOrder.ARRIVAL

    @property
    def is_chosen_later(self) -> bool:
        """Whether the schedule is still to be chosen from a launch command: by ``plan``, or by an
        ``auto`` with open options."""
        return _is_chosen_later(self.schedule)

    @cached_property
    def resolved_spec(self) -> ResolvedSpec:
        """The schedule's resolved spec. Raises ValueError if the schedule does not exist or is
        still to be chosen."""
        assert self.schedule is not None
        if self.is_chosen_later:
            tells = PLAN if self.schedule == PLAN else f"simulate {self.schedule}"
            raise ValueError(
                f"the schedule {self.schedule!r} is chosen for a launch command, and this process "
                "has none: launch by python -m megatron_ext SCRIPT ..., or write the name of a "
                f"schedule, which 'megatron-ext {tells}' finds"
            )
        return choose(self.schedule)

    @property
    def specs(self) -> tuple[str, ...]:
        """Specs of all schedules under which steps may run, as users write them; none under
        Megatron's own."""
        if self.race is not None:
            return self.race.specs
        return () if self.schedule is None else (self.schedule,)

    @property
    def resolved_specs(self) -> tuple[ResolvedSpec, ...]:
        """Resolved specs of all schedules under which steps may run: one, or all of
        --pipeline-race. Raises as `resolved_spec`."""
        return (self.resolved_spec,) if self.race is None else self.race.resolved_specs

    @property
    def splits_backward(self) -> bool:
        """Whether any of the schedules splits the backward pass."""
        return any(resolved.traits.splits_backward for resolved in self.resolved_specs)

    @property
    def recomputes(self) -> bool:
        """Whether any of the schedules may recompute activations."""
        return self.recompute != Recompute() or any(
            resolved.recomputes for resolved in self.resolved_specs
        )

    @property
    def options(self) -> ScheduleOptions:
        """Options of the schedule that are settings of ours. Others, as overlapped passes, have
        their defaults: Megatron's settings may request them."""
        declared = self.__dataclass_fields__
        names = (option.name for option in fields(ScheduleOptions))
        given = {
            name: getattr(self, setting_of(name)) for name in names if setting_of(name) in declared
        }
        slices = Slices(self.slices, self.slice_lengths, self.join_slice_weights)
        return ScheduleOptions(**given | {"slices": slices})

    def problem(
        self,
        placement: Placement,
        microbatches: int,
        costs: Costs,
        forward_only: bool = False,
        requested: Mapping[str, Any] | None = None,
    ) -> Problem:
        """Return the problem that a program of ``microbatches`` has to solve. ``requested`` are
        options that Megatron's settings request.

        Raises:
            ValueError: the memory limit cannot be parsed, or as `Problem`.
        """
        limit = None
        if self.memory_limit is not None:
            limit = parse_limit(self.memory_limit, placement.ranks, microbatches)
        options = replace(self.options, **(requested or {}))
        return Problem(placement, microbatches, costs, limit, forward_only, options)


def _is_chosen_later(schedule: str | None) -> bool:
    return schedule is not None and (schedule == PLAN or is_open(schedule))


def _as_text(setting: Field[Any], value: object) -> str | bool:
    """Return ``value`` as the flag of ``setting`` has it. Code may give a number or a path.

    Raises:
        ValueError: the value has another type.
    """
    is_switch = setting.default is False
    if is_switch and isinstance(value, bool):
        return value
    if is_switch or isinstance(value, bool) or not isinstance(value, str | int | float | PurePath):
        write = "True or False" if is_switch else f"{setting.metadata['metavar']} as text"
        raise ValueError(
            f"{flag(setting.name)}: {value!r} is no value of this setting: write {write}"
        )
    return str(value)


def is_on_stock(setting: Field[Any]) -> bool:
    """Return whether ``setting`` also acts on Megatron's own pipeline."""
    return bool(setting.metadata.get("on_stock"))


# Names of the settings that request options of a schedule.
SCHEDULE_SETTINGS = tuple(
    setting.name
    for setting in fields(PipelineConfig)
    if setting.name in settings_of_options(ScheduleOptions())
)


def default_text(setting: Field[Any]) -> str | bool | None:
    """Return the default of ``setting`` as a user would write it."""
    default = setting.default
    return default if default is None or default is False else str(default)
