"""Records of refusals as a user reads them: those in tables, and those of functions that read
settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_ext.adapter.compatibility import refuse, refuse_order
from megatron_ext.adapter.handled_settings.refused_setting import RefusalGroup, RefusedSetting
from megatron_ext.adapter.refusals import REFUSALS
from megatron_ext.compile.registry import ResolvedSpec, choose, entries
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.features import FEATURES
from megatron_ext.schedule.problem import ScheduleOptions, VocabularyParallel
from megatron_ext.schedule.schedule import Schedule
from megatron_ext.schedule.schedule_csv import from_csv
from megatron_ext.written_settings import from_argv, from_environment
from tests.behaviour.inputs import HOST, run, write_inputs
from tests.behaviour.record import Subject

_VALUES: tuple[object, ...] = (
    *(False, True, 0, 1, 2, "none", "full", "local", "full_iteration", "transformer_engine"),
    *("torch_dist", "adam", "sgd", "muon", "disabled"),
    *("delayed", "blockwise", "global_aux_loss", ["moe"]),
)


def refusals() -> Subject:
    write_inputs()
    return {
        **refusals_by_feature(),
        **_of_features(),
        **_of_schedules(),
        **_of_settings(),
        **_of_files(),
    }


def _refusal(work: Callable[[], object]) -> str:
    try:
        work()
    except ValueError as error:
        return str(error)
    return "accepted"


# --- Megatron's settings with ours


def refusals_by_feature() -> Subject:
    """Return a record of each refusal."""
    return {
        f"{group.name}: {refusal.setting}": partial(_row, refusal, group)
        for group in REFUSALS
        for refusal in group.refusals
    }


def _row(refusal: RefusedSetting, group: RefusalGroup) -> str:
    """Return the refused values and the schedules that refuse them. The message for the first
    value, under a line or V schedule, follows."""
    values = [value for value in _VALUES if _is_refused(refusal, value)]
    names = [name for name in entries() if refusal.by(choose(name))]
    which = "whatever is true" if values == [value for value in _VALUES if value] else f"{values}"
    whose = _of_all(names)
    line_or_v = next(name for name in names if choose(name).example.name in ("line", "v"))
    settings = {"load": "FOLDER", "hidden_dropout": 0.1, **group.settings}
    settings[refusal.setting] = values[0]
    error = _refusal(partial(_refuse, line_or_v, settings, group.options))
    return f"{which}, by {whose}\n{error}"


def _of_all(names: Sequence[str]) -> str:
    return "all" if len(names) == len(entries()) else ", ".join(names) or "none"


def _is_refused(refusal: RefusedSetting, value: object) -> bool:
    try:
        return refusal.unsupported(value)
    except TypeError:  # the setting was given a text, not a number
        return False


def _refuse(name: str, settings: dict[str, Any], options: ScheduleOptions) -> None:
    resolved = choose(name)
    refuse(_megatrons(resolved, settings), resolved, options)


def _megatrons(resolved: ResolvedSpec, settings: dict[str, Any]) -> SimpleNamespace:
    """Return Megatron's arguments on two ranks, with ``settings``."""
    chunks = resolved.place(2).chunks
    sizes = {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
        "save": "checkpoints",
    }
    return SimpleNamespace(**sizes | settings)


def _of_features() -> Subject:
    """Return, by feature, the schedules and settings that require it. The records of command
    outputs list the patches of the features."""
    return {f"feature {feature.name}": partial(_wanted, feature.applies_to) for feature in FEATURES}


def _wanted(is_wanted: Callable[[PipelineConfig], bool]) -> str:
    asked: dict[str, dict[str, Any]] = {
        "alone": {},
        "profiled": {"costs": "profile"},
        "vocabulary": {"vocab_parallel": "1"},
        "offload": {"activation_offload": "full"},
        "recompute": {"recompute": "first:1"},
        "post-validation": {"post_validation": True},
    }
    lines = []
    for about, settings in asked.items():
        names = [n for n in entries() if is_wanted(PipelineConfig.parse(schedule=n, **settings))]
        lines.append(f"{about}: {_of_all(names)}")
    return "\n".join(lines)


def _of_schedules() -> Subject:
    """Return the refusals of placements and chunks by `refuse`, and of orders by `refuse_order`."""
    Path("uneven.csv").write_text("0F0,2F0,2B0,0B0\n1F0,1B0\n")
    Path("turned.csv").write_text("1F0,1B0\n0F0,0B0\n")
    cases: dict[str, tuple[str, dict[str, Any], ScheduleOptions]] = {
        "stages of ranks": ("uneven.csv", {}, ScheduleOptions()),
        "last stage": ("turned.csv", {}, ScheduleOptions()),
        "chunks": ("zb-v", {"virtual_pipeline_model_parallel_size": 3}, ScheduleOptions()),
        "chunks of a loop": (
            "interleaved",
            {"virtual_pipeline_model_parallel_size": 3},
            ScheduleOptions(),
        ),
        "group": (
            "interleaved:group=6",
            {"microbatch_group_size_per_vp_stage": 4},
            ScheduleOptions(),
        ),
        "vocabulary": ("interleaved", {}, ScheduleOptions(vocab_parallel=VocabularyParallel.ONE)),
        "barriers": (
            "zb-h1",
            {"timing_log_level": 1, "barrier_with_L1_time": True},
            ScheduleOptions(steps_overlap=True),
        ),
    }
    orders = {
        "first weight gradient": "0F0,0F1,0B1,0B0\n",
        "order of recompute": "0F0,0F1,0I1,0I0,0W0,0W1\n",
    }
    return {
        **{
            f"refused: {n}": partial(_refusal, partial(_refuse, a, b, c))
            for n, (a, b, c) in cases.items()
        },
        **{
            f"refused: {n}": partial(_refusal, partial(_refuse_order, from_csv(t, "mine.csv")))
            for n, t in orders.items()
        },
    }


def _refuse_order(schedule: Schedule) -> None:
    settings = SimpleNamespace(
        transformer_impl="transformer_engine",
        gradient_accumulation_fusion="I" not in str(schedule.rows),
        fp8="hybrid",
        fp8_recipe="delayed",
        recompute_granularity="full",
    )
    refuse_order(settings, schedule)


# --- our settings: each alone, and each with each other one


_FLAGS = (
    "--pipeline-memory-limit 4",
    "--pipeline-memory-limit much",
    "--pipeline-costs f=1,i=1,w=1",
    "--pipeline-costs profile",
    "--pipeline-costs profile:",
    "--pipeline-p2p batched",
    "--pipeline-p2p fast",
    "--pipeline-vocab-parallel 1",
    "--pipeline-vocab-parallel 3",
    "--pipeline-activation-offload full",
    "--pipeline-activation-offload fit",
    "--pipeline-activation-offload some",
    "--pipeline-post-validation",
    "--pipeline-trace folder",
    "--pipeline-trace-iters 10:12",
    "--pipeline-trace-iters 12:10",
)
_OPTIONS = (
    "--p2p batched",
    "--vocab-parallel 1",
    "--activation-offload half",
    "--activation-offload fit",
    "--post-validation",
    "--memory-limit 1",
    "--memory-limit much",
    "--certify 1",
    "--csv mine.out",
    "--plot x.pdf",
)
_SIMULATED = (
    "zb-h9 --pp 2 -m 2",
    "zb-h1:ahead=2 --pp 2 -m 2",
    "interleaved:group=x --pp 2 -m 2",
    "interleaved:vpp=0 --pp 2 -m 2",
    "1f1b:vpp=3 --pp 2 -m 2",
    "none.csv --pp 2 -m 2",
    "none.py --pp 2 -m 2",
    "my_schedule.py:ahead=x --pp 2 -m 2",
    "mine.csv --pp 3 -m 2",
    "mine.csv --pp 2 -m 3",
    "1f1b --pp 0 -m 4",
    "1f1b --pp 4 -m 0",
    "1f1b --pp 4 -m 8 --memory-limit 3",
    "1f1b --pp 4 -m 8 --memory-limit 1GiB",
    "1f1b --pp 4 -m 8 --memory-limit 1GiB --costs bytes.json",
    "zb-auto --pp 4 -m 8 --memory-limit 0.5",
    "zb-v --pp 4 -m 8 --memory-limit 0.5",
    "v-auto --pp 4 -m 8 --memory-limit 0.25",
    "1f1b --pp 2 -m 2 --costs none.json",
    "1f1b --pp 2 -m 2 --activation-offload half",
    "1f1b --pp 2 -m 2 --activation-offload fit",
    "1f1b --pp 2 -m 2 --p2p slow",
)
_COSTS = (
    "f=1",
    "f=1,i=1,w=1,x=1",
    "f=1,f=1,i=1,w=1",
    "f=a,i=1,w=1",
    "f=-1,i=1,w=1",
    "f=0,i=0,w=0",
    "f=1/2/3,i=1,w=1",
    "f=1,i=1,w=1,comm=1/2",
    "f=1,i=1,w=1,output_layer=1",
    "f=1,i=1,w=1,embedding=1/2/3",
    "f=1,i=1,w=1,h2d=1",
    "f=1,i=1,w=1,d2h=1,link=0",
    "f=1,i=1,w=1,d2h=1,duplex=2",
)
_COMMANDS = (
    "simulate",
    "simulate 1f1b",
    "plan --gpu H100 pp=2,m=2",
    "plan pp=2,m=2,layers=4,hidden=8",
    "plan --gpu H99 pp=2,m=2,layers=4,hidden=8,heads=2,sequence=8,vocabulary=8",
    "plan --gpu H100 pp=2,m=2,layers=4,hidden=8,heads=2,sequence=8,vocabulary=8,x=1",
    "plan --memory-limit 0.1 pp=2,m=4",
    "trace none",
    "verify none.csv",
    "doctor --pipeline-memory-limit 4",
    "doctor -- nothing",
    "nothing",
)
_ENVIRONMENTS: tuple[dict[str, str], ...] = (
    {},
    {"MEGATRON_EXT_SCHEDULE": "zb-h9"},
    {"MEGATRON_EXT_SCHEDULE": "plan"},
    {"MEGATRON_EXT_SCHEDULE": "zb-h1", "MEGATRON_EXT_NOTHING": "1"},
    {"MEGATRON_EXT_SCHEDULE": "zb-h1", "MEGATRON_EXT_P2P": "fast"},
    {"MEGATRON_EXT_SCHEDULE": "zb-h1", "MEGATRON_EXT_POST_VALIDATION": "yes"},
)


def _of_settings() -> Subject:
    flags = [f"--pipeline-schedule zb-v {words}" for words in _beside(_FLAGS)]
    flags += [*_FLAGS, "--pipeline-schedule zb-h9", "--pipeline-schedule zb-h1:x=1"]
    simulated = [f"1f1b --pp 4 -m 8 {HOST} {words}" for words in _beside(_OPTIONS)]
    simulated += [*_SIMULATED, *(f"1f1b --pp 2 -m 2 --costs {text}" for text in _COSTS)]
    commands = [*(f"simulate {words}" for words in simulated), *_COMMANDS]
    return {
        **{words: partial(_refusal, partial(from_argv, words.split())) for words in flags},
        **{words: partial(_complaint, words) for words in commands},
        **{
            f"environment {' '.join(f'{k}={v}' for k, v in given.items())}".rstrip(): partial(
                _refusal, partial(from_environment, given)
            )
            for given in _ENVIRONMENTS
        },
    }


def _beside(words: Sequence[str]) -> Iterator[str]:
    yield from words
    for flag, other in combinations(words, 2):
        if flag.split()[0] != other.split()[0]:
            yield f"{flag} {other}"


def _complaint(command: str) -> str:
    said = run(command)
    return said if said.startswith("exits") else "accepted"


# --- files


_TABLES_OF_A_USER = {
    "no action": "0F0,0B0\n1F0,1Q0\n",
    "empty line": "0F0,0B0\n\n1F0,1B0\n",
    "missing stage": "0F0,0B0\n2F0,2B0\n",
    "nothing": "",
    "message": "0F0,0SEND_F0,0B0\n1F0,1B0\n",
    "vocabulary": "0F0,0S0,0B0\n1F0,1B0\n",
    "missing action": "0F0,0B0,0F1\n1F0,1B0,1F1,1B1\n",
    "twice": "0F0,0B0,0B0\n1F0,1B0\n",
    "two ranks": "0F0,0B0,0F1\n1F0,1B0,1F1,1B1,0B1\n",
    "B and I": "0F0,0B0,0I0,0W0\n",
    "order": "0B0,0F0\n1F0,1B0\n",
    "cycle": "0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n",
}
_COSTS_OF_A_USER = {
    "no JSON": "f=1",
    "version": '{"version": 1, "f": 1, "i": 1, "w": 1}',
    "missing": '{"version": 2, "f": 1}',
    "unknown": '{"version": 2, "f": 1, "i": 1, "w": 1, "x": 1}',
    "bytes": '{"version": 2, "f": 1, "i": 1, "w": 1, "bytes": {"activation": 1}}',
    "length": '{"version": 2, "f": [1, 2, 3], "i": 1, "w": 1}',
}


def _of_files() -> Subject:
    return {
        **{f"table: {name}": partial(_table, text) for name, text in _TABLES_OF_A_USER.items()},
        **{f"costs: {name}": partial(_costs, text) for name, text in _COSTS_OF_A_USER.items()},
    }


def _table(text: str) -> str:
    Path("table.csv").write_text(text)
    return run("verify table.csv")


def _costs(text: str) -> str:
    Path("table.json").write_text(text)
    return run("simulate 1f1b --pp 2 -m 2 --costs table.json")
