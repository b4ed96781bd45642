"""Names of Megatron's arguments that say which layers lie on which stage.

Several modules set, compare or refuse them. Some have another name in a TransformerConfig than on
the command line.
"""

from __future__ import annotations

CHUNKS = "num_virtual_stages_per_pipeline_rank"
LAYERS_OF_CHUNK = "num_layers_per_virtual_pipeline_stage"
LAYOUT = "pipeline_model_parallel_layout"
ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
_COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
# Argument with the layers of a hybrid model. Such a model ignores the layout arguments above.
PATTERN = "hybrid_layer_pattern"

VIRTUAL_STAGES = (LAYERS_OF_CHUNK, CHUNKS, LAYOUT)
PLACING = (*VIRTUAL_STAGES, *ENDS, *_COUNTED)

# Names of the arguments for stages and layers in a TransformerConfig, which lacks some of them.
ENDS_IN_CONFIGS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
CHUNKS_IN_CONFIGS = "virtual_pipeline_model_parallel_size"
LAYOUT_FIELDS = (LAYOUT, *ENDS_IN_CONFIGS, *_COUNTED)
NAMES_IN_CONFIGS = {
    CHUNKS_IN_CONFIGS: CHUNKS,
    **dict(zip(ENDS_IN_CONFIGS, ENDS, strict=True)),
}
