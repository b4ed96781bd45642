"""Declaration of all settings: flags, variables and `install` follow `PipelineConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_ext.base.setting import (
    ON_STOCK,
    as_given,
    as_path,
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
PREFIX = "pipeline_"  # of our settings among Megatron's arguments

# Allows to patch a Megatron with unknown sources; a variable only, not a setting of a run.
ALLOW_UNKNOWN = f"{VARIABLES}ALLOW_UNKNOWN"


def variable(name: str) -> str:
    """Return the environment variable of the setting ``name``."""
    return VARIABLES + name.upper()


@dataclass(frozen=True)
class CostsSource:
    """Source of the costs.

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
        """Costs file with which the run begins; None if there is none."""
        return None if self.is_estimate or "=" in self.text else Path(self.text)

    @property
    def in_seconds(self) -> bool:
        """Whether times are seconds, and not in a unit of the user's own."""
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
        parse_limit(text, 1, 1)  # the sizes of the job tell later how much a share is
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
        default=VocabularyParallel.NONE,
        metadata=enumerated(
            VocabularyParallel,
            "Vocabulary parallelism: 1 or 2 partition the embedding and the output layer over all "
            "pipeline ranks, and schedule their passes. 1 stores two more microbatches, 2 stores "
            "one more. Default: none, with both layers on the first and the last stage.",
        ),
    )
    activation_offload: Offload = field(
        default=Offload.NONE,
        metadata=enumerated(
            Offload,
            "Activations to copy to host memory until they are needed: none (the default), half, "
            "full or fit. half copies those of the longer-lived half of a rank's chunks, full all "
            "that the host link carries without delaying a pass, and fit as few as meet "
            "--pipeline-memory-limit.",
        ),
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
    post_validation: bool = field(
        default=False,
        metadata=switch(
            "Experimental: overlap consecutive steps. The optimizer updates parameters before the "
            "global gradient norm is known, and checks the norm during the next step's warm-up. An "
            "update that should have been clipped or skipped is then undone and repeated exactly."
        ),
    )
    microbatch_order: MicrobatchOrder = field(
        default=MicrobatchOrder.ARRIVAL,
        metadata=ON_STOCK
        | enumerated(
            MicrobatchOrder,
            "Order of a step's microbatches: arrival (the default), or small-ends (the most costly "
            "microbatches in the middle), which shortens the waits of all schedules, Megatron's "
            "too. The cost of a microbatch is the sum of its documents' squared lengths. Requires "
            "--dataloader-inter-document-masking.",
        ),
    )
    deal_microbatches: bool = field(
        default=False,
        metadata=ON_STOCK
        | switch(
            "Deal the microbatches of the global batch to data-parallel replicas by their cost, so "
            "that all replicas take about as long. The number of microbatches of a replica stays "
            "the same. Requires --dataloader-inter-document-masking."
        ),
    )
    microbatch_weights: Path | None = field(
        default=None,
        metadata=ON_STOCK
        | setting(
            as_path,
            "FILE.npy",
            "Costs of samples, by which microbatches are ordered and dealt: a numpy array of "
            "positive numbers, indexed as the training data set is. Default: the sum of the "
            "squared lengths of a sample's documents.",
        ),
    )
    report_split: bool = field(default=False, metadata=DECLARED["report_split"])
    metrics: bool = field(default=False, metadata=DECLARED["metrics"])
    trace: Path | None = field(default=None, metadata=DECLARED["trace"])
    trace_iters: range | None = field(default=None, metadata=DECLARED["trace_iters"])
    race: Contestants | None = field(default=None, metadata=DECLARED["race"])
    race_then: RaceThen = field(default=RaceThen.WINNER, metadata=DECLARED["race_then"])

    @classmethod
    def parse(cls, **settings: str | bool | None) -> PipelineConfig:
        """Return the config of the settings that a user wrote; None stands for a default.

        Raises:
            TypeError: there is no such setting.
            ValueError: a setting cannot be parsed, or the config itself refuses the settings.
        """
        declared = {setting.name: setting for setting in fields(cls)}
        for name in settings.keys() - declared.keys():
            raise TypeError(f"there is no setting {name!r}: write one of {', '.join(declared)}")
        given = {
            name: settings[name]
            for name, setting in declared.items()
            if settings.get(name) not in (None, default_text(setting))
        }
        if not given.keys() & {*NAMING_SCHEDULES}:
            for name, value in given.items():
                if not is_on_stock(declared[name]):
                    raise ValueError(
                        f"{flag_with_value(name, value)} is given without {flag('schedule')}: the "
                        f"flag acts on a schedule of ours only; add {flag('schedule')}, or drop "
                        f"{flag(name)}"
                    )
        parsed = {n: declared[n].metadata["parse"](n, value) for n, value in given.items()}
        if not _is_chosen_later(parsed.get("schedule")):
            for feature in FEATURES:
                parsed |= feature.completed(parsed)
        return cls(**parsed)

    def __post_init__(self) -> None:
        self._check_features(only_watch=True)
        if self.microbatch_weights is not None and not self.arranges_microbatches:
            raise ValueError(
                f"{flag('microbatch_weights')} {self.microbatch_weights}: no microbatches are "
                f"arranged by them; add {flag('microbatch_order')} small-ends"
            )
        if self.schedule is None:
            return
        if not self.is_chosen_later:
            _ = self.resolved_spec
        self._check_offload()
        self._check_slices()
        if self.recompute.fit and self.memory_limit is None:
            raise ValueError(
                f"{flag('recompute')} {self.recompute} has nothing to fit into: add "
                f"{flag('memory_limit')}, or write first:N"
            )
        if (conflict := self.options.conflict) is not None:
            first, second = map(setting_of, conflict.options)
            raise ValueError(conflict.text(self._as_written(first), self._as_written(second)))
        if self.costs.text == f"{PROFILE}:":
            raise ValueError(
                f"{flag('costs')} {self.costs} names no file: write {PROFILE}:FILE, or {PROFILE} "
                f"for {COSTS_FILE} in the folder of --save"
            )
        self._check_features(only_watch=False)

    def _check_features(self, *, only_watch: bool) -> None:
        for feature in FEATURES:
            if feature.only_watches == only_watch:
                feature.check(self)

    def _check_offload(self) -> None:
        method, costs = self.activation_offload, self.costs.text
        if method is Offload.FIT and self.memory_limit is None:
            raise ValueError(
                f"{flag('activation_offload')} {method} has nothing to fit into: add "
                f"{flag('memory_limit')}, or write {Offload.FULL} or {Offload.HALF}"
            )
        if method is not Offload.NONE and "=" in costs and "d2h=" not in costs:
            raise ValueError(
                f"{flag('activation_offload')} {method} needs to know how long copies to the host "
                f"take: add d2h= and h2d= to {flag('costs')} {costs} (seconds per microbatch "
                f"of a rank), or drop {flag('costs')} for an estimate"
            )

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

    def _as_written(self, name: str) -> str:
        return flag_with_value(name, getattr(self, name))

    @property
    def watches_stock(self) -> bool:
        """Whether Megatron's own pipeline runs and is observed."""
        return self.schedule is None and any(getattr(self, name) for name in WATCHING_STOCK)

    @property
    def changes_launch(self) -> bool:
        """Whether a launch with these settings is patched."""
        return self.schedule is not None or self.watches_stock or self.arranges_microbatches

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
        """Chosen schedule. Raises ValueError if it does not exist or is still to be chosen."""
        assert self.schedule is not None
        if self.is_chosen_later:
            tells = PLAN if self.schedule == PLAN else f"simulate {self.schedule}"
            raise ValueError(
                f"the schedule {self.schedule!r} is chosen from a launch command: launch as "
                f"python -m megatron_ext SCRIPT ..., or write the name of a schedule; "
                f"'megatron-ext {tells}' says which"
            )
        return choose(self.schedule)

    @property
    def specs(self) -> tuple[str, ...]:
        """All schedules under which steps may run, as users write them; none under Megatron's."""
        if self.race is not None:
            return self.race.specs
        return () if self.schedule is None else (self.schedule,)

    @property
    def resolved_specs(self) -> tuple[ResolvedSpec, ...]:
        """All schedules under which steps may run: one, or those of a race. Raises as
        `resolved_spec`."""
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
        """Options of the schedule that are settings of ours: all except overlapped passes, which
        Megatron's settings request."""
        names = {option.name for option in fields(ScheduleOptions)} - {"pairs"}
        given = {name: getattr(self, setting_of(name)) for name in names}
        return ScheduleOptions(**given | {"slices": Slices(self.slices, self.slice_lengths)})

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


def is_on_stock(setting: Field[Any]) -> bool:
    """Whether ``setting`` also acts on Megatron's own pipeline."""
    return bool(setting.metadata.get("on_stock"))


def setting_of(option: str) -> str:
    """Return the name of the setting that requests ``option`` of `ScheduleOptions`."""
    return "post_validation" if option == "steps_overlap" else option


def default_text(setting: Field[Any]) -> str | bool | None:
    """Return the default of ``setting``, as a user would write it."""
    default = setting.default
    return default if default is None or default is False else str(default)
