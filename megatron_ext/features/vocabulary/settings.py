"""Setting that partitions embedding and output layer over all pipeline ranks."""

from __future__ import annotations

from megatron_ext.base.setting import FeatureSettings, enumerated
from megatron_ext.schedule.problem import VocabularyParallel

VOCABULARY_SETTINGS = FeatureSettings(
    {
        "vocab_parallel": enumerated(
            VocabularyParallel,
            help="Vocabulary parallelism: 1 or 2 partition the embedding and the output layer over "
            "all pipeline ranks, and schedule their passes. 1 stores two more microbatches, 2 "
            "stores one more. Default: none, with both layers on the first and the last stage.",
        )
    }
)
