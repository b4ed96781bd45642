"""Settings of recipes that schedules may depend on, by name.

A setting is named as in Megatron's arguments and configs, or as in Megatron-Bridge's configs if
Megatron has no such setting. A recipe's setting that is neither here nor Megatron's is unknown.
"""

from __future__ import annotations

from megatron_ext.adapter.layout_arguments import ENDS, ENDS_IN_CONFIGS

NAMES = (
    *("pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("microbatch_group_size_per_vp_stage", "tensor_model_parallel_size", "sequence_parallel"),
    *("context_parallel_size", "cp_comm_type", "expert_model_parallel_size"),
    *("expert_tensor_parallel_size", "use_distributed_optimizer"),
    *("data_parallel_sharding_strategy", "overlap_grad_reduce", "overlap_param_gather"),
    *("overlap_param_gather_with_optimizer_step", "average_in_collective"),
    *("check_for_nan_in_grad", "num_distributed_optimizer_instances"),
    *("use_layer_wise_distributed_optimizer", "tp_comm_overlap", "batch_p2p_comm"),
    *("overlap_p2p_comm", "deallocate_pipeline_outputs", "variable_seq_lengths"),
    *("pipeline_model_parallel_layout", "num_layers_in_first_pipeline_stage"),
    *("num_layers_in_last_pipeline_stage", "account_for_embedding_in_pipeline_split"),
    *("account_for_loss_in_pipeline_split", "num_layers", "hidden_size", "ffn_hidden_size"),
    *("num_attention_heads", "num_query_groups", "kv_channels", "vocab_size", "seq_length"),
    *("mamba_head_dim", "mamba_num_groups", "mamba_num_heads", "mamba_state_dim"),
    *("transformer_impl", "untie_embeddings_and_output_weights", "group_query_attention"),
    *("qk_layernorm", "multi_latent_attention", "window_size", "softmax_type"),
    *("attention_output_gate", "head_wise_attn_gate", "experimental_attention_variant"),
    *("dsa_indexer_loss_coeff", "dsa_indexer_use_sparse_loss", "dsa_kernel_backend"),
    *("enable_hyper_connections", "hybrid_layer_pattern", "vision", "freeze_vision_model"),
    *("freeze_language_model", "peft", "mtp_num_layers", "mtp_use_repeated_layer"),
    *("mtp_loss_scaling_factor", "mtp_eval_in_bf16", "num_experts", "moe_layer_freq"),
    *("moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_latent_size"),
    *("moe_n_hash_layers", "moe_router_num_groups", "moe_grouped_gemm"),
    *("moe_token_dispatcher_type", "moe_flex_dispatcher_backend", "moe_shared_expert_overlap"),
    *("moe_router_dtype", "moe_router_force_load_balancing", "moe_expert_capacity_factor"),
    *("moe_expert_rank_capacity_factor", "moe_paged_stash"),
    *("moe_paged_stash_buffer_size_factor_cpu", "moe_paged_stash_buffer_size_factor_cuda"),
    *("moe_aux_loss_coeff", "moe_z_loss_coeff", "overlap_moe_expert_parallel_comm"),
    *("high_priority_a2a_comm_stream", "moe_a2a_overlap", "delay_wgrad_compute"),
    *("overlap_dispatch_backward_with_experts_wgrad", "defer_embedding_wgrad_compute"),
    *("wgrad_deferral_limit", "precision", "pipeline_dtype", "fp8_output_proj"),
    *("first_last_layers_bf16", "fp8_param_gather", "fp4_param_gather"),
    "reuse_grad_buf_for_mxfp8_param_ag",
    *("gradient_accumulation_fusion", "grad_reduce_in_fp32", "use_transformer_engine_op_fuser"),
    *("cross_entropy_loss_fusion", "cross_entropy_fusion_impl", "calculate_per_token_loss"),
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
    *("fine_grained_activation_offloading", "offload_modules", "cuda_graph_impl"),
    *("cuda_graph_scope", "optimizer", "use_precision_aware_optimizer", "main_grads_dtype"),
    *("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "optimizer_cpu_offload"),
    *("clip_grad", "packed", "dataset_kwargs", "max_packing_seqlen", "packed_sequence_size"),
    *("ckpt_format", "global_batch_size", "micro_batch_size"),
)

# Other names of settings with the same meaning.
OTHER_NAMES = {
    "sft": "packed",
    "enable_offline_packing": "packed",
    "enable_in_batch_packing": "packed",
    "num_moe_experts": "num_experts",
    **dict(zip(ENDS, ENDS_IN_CONFIGS, strict=True)),
    "accumulate_allreduce_grads_in_fp32": "grad_reduce_in_fp32",
    "cuda_graph_modules": "cuda_graph_scope",
}
# Value that stands for whole layers: these are captured if cuda_graph_scope names no modules.
WHOLE_LAYERS = "layer"
