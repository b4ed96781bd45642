"""Settings of Megatron and placements that vocabulary parallelism refuses, and its patches.

Passes of the schedule make logits and loss from the tables' rows, so whatever changes Megatron's
own output layer or loss would be ignored without a word.
"""

from __future__ import annotations

from megatron_ext.adapter.handled_settings.feature_refusals import FeatureRefusals
from megatron_ext.adapter.handled_settings.handled_setting import HandledSetting
from megatron_ext.adapter.handled_settings.refused_setting import (
    RefusalGroup,
    RefusedSetting,
    by_option,
    drop,
    only_torch_dist,
)
from megatron_ext.compile.registry import ResolvedSpec
from megatron_ext.config import PipelineConfig
from megatron_ext.schedule.placement import Placement, is_line_or_v
from megatron_ext.schedule.problem import ScheduleOptions, VocabularyParallel

_MADE_BY_PASSES = "the loss is made by passes of the schedule"
_WITHOUT_DIVIDING = "drop --pipeline-vocab-parallel"

_REFUSED = (
    drop("fp16_lm_cross_entropy", f"{_MADE_BY_PASSES}, in fp32"),
    RefusedSetting(
        "use_mup", bool, f"MuP scales the logits, and here they are not: {_WITHOUT_DIVIDING}"
    ),
    drop("fp8_output_proj", "the logits are not made in fp8"),
    *(
        drop(name, "the output layer is run by passes of the schedule, which no log would show")
        for name in ("save_activations_interval", "save_dgrads_interval")
    ),
    RefusedSetting(
        "hybrid_layer_pattern", bool, f"it divides the tables of a GPTModel: {_WITHOUT_DIVIDING}"
    ),
    RefusedSetting("logits_load_dir", bool, f"{_MADE_BY_PASSES}, from labels: {_WITHOUT_DIVIDING}"),
    RefusedSetting(
        "modelopt_enabled", bool, f"models of ModelOpt are untried: {_WITHOUT_DIVIDING}"
    ),
    RefusedSetting(
        "mtp_num_layers",
        bool,
        f"multi-token prediction needs whole tables on the last stage: {_WITHOUT_DIVIDING}",
    ),
    drop("init_model_with_meta_device"),
    only_torch_dist("a rank's rows are others than stock's"),
    RefusedSetting(
        "variable_seq_lengths",
        bool,
        "collectives need one shape: give all microbatches one sequence length",
    ),
    RefusedSetting(
        "gtp_weight_remat_size", lambda value: value > 1, "drop --tensor-parallel-num-weight-shards"
    ),
)


def _check_placement(
    resolved: ResolvedSpec, placement: Placement, options: ScheduleOptions
) -> None:
    if not is_line_or_v(placement):
        raise ValueError(
            f"--pipeline-vocab-parallel {options.vocab_parallel} does not go with "
            f"--pipeline-schedule {resolved.spec}, whose stages are on ranks "
            f"{list(placement.rank_of)}: choose a schedule with one stage on each rank, in order, "
            f"or a V such as zb-v, v-half or v-auto"
        )


def _is_on(config: PipelineConfig) -> bool:
    return config.vocab_parallel is not VocabularyParallel.NONE


VOCABULARY_REFUSALS = FeatureRefusals(
    _is_on,
    name="vocabulary parallelism",
    patches=("megatron.core.models.gpt.gpt_model.tables",),
    groups=(
        RefusalGroup(
            "vocabulary refusals",
            _REFUSED,
            by_option("vocab_parallel"),
            options=ScheduleOptions(vocab_parallel=VocabularyParallel.ONE),
            check_placement=_check_placement,
        ),
    ),
    handled=(
        HandledSetting(
            "cross_entropy_loss_fusion",
            "passes of --pipeline-vocab-parallel make the loss, fused their own way",
            by=_is_on,
            stays=True,
        ),
    ),
)
