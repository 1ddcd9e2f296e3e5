"""What Megatron-LM, Megatron-Bridge, NeMo and torchtitan call the parameters of a training job.

Megatron-LM: megatron/training/arguments.py; Megatron-Bridge: megatron/bridge/training/config.py; NeMo:
nemo/collections/llm; torchtitan: torchtitan/config/job_config.py (with the section before a dot). Names are written
with underscores; command lines take dashes too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

ALIASES: Mapping[str, tuple[str, ...]] = {
    "gpus": ("gpu",),
    "tp": ("tensor_model_parallel_size", "parallelism.tensor_parallel_degree"),
    "pp": ("pipeline_model_parallel_size", "parallelism.pipeline_parallel_degree"),
    "cp": ("context_parallel_size", "parallelism.context_parallel_degree"),
    "ep": ("expert_model_parallel_size", "parallelism.expert_parallel_degree"),
    "expert_tp": ("expert_tensor_parallel_size", "parallelism.expert_tensor_parallel_degree"),
    "dp": ("data_parallel_size",),
    "micro_batch": ("micro_batch_size", "training.local_batch_size", "per_device_train_batch_size", "batch_size"),
    "global_batch": ("global_batch_size", "training.global_batch_size"),
    "gradient_accumulation_steps": ("grad_accum_steps",),
    "seq": ("seq_length", "training.seq_len", "seq_len", "max_length"),
    "precision": ("fp8_recipe", "mixed_precision", "dtype"),
    "recompute": ("recompute_granularity", "activation_checkpoint.mode"),
    "recompute_method": (),
    "recompute_layers": ("recompute_num_layers",),
    "recompute_modules": ("activation_checkpoint.selective_ac_option",),
    "virtual_stages": ("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank"),
    "layers_per_virtual_stage": ("num_layers_per_virtual_pipeline_stage",),
    "schedule": ("parallelism.pipeline_parallel_schedule",),
    "distributed_optimizer": ("use_distributed_optimizer",),
    "overlap": ("overlap_grad_reduce",),
    "tp_overlap": ("tp_comm_overlap", "parallelism.enable_async_tensor_parallel"),
    "cp_comm": ("cp_comm_type",),
    "dispatcher": ("moe_token_dispatcher_type", "moe_flex_dispatcher_backend"),
    "expert_overlap": ("overlap_moe_expert_parallel_comm", "moe_a2a_overlap"),
    "cuda_graphs": ("cuda_graph_impl",),
    "fp8_param_gather": ("fp8_param",),
    "offload_layers": ("cpu_offloading_num_layers",),
    "offload_optimizer": ("optimizer_cpu_offload",),
    "lora_rank": ("lora_dim", "lora_r"),
    "checkpoint_every": ("save_interval",),
    "tokens": (),
    "gpus_per_node": ("nproc_per_node",),
}  # fmt: skip
MEGATRON = {"virtual_stages": "num_virtual_stages_per_pipeline_rank"}  # Megatron-LM's names, where not the first above
# Of a run, without effect on how long its steps take; and whether a value follows
WITHOUT_EFFECT: Mapping[str, bool] = {
    **dict.fromkeys(("bf16", "use_mcore_models", "no_load_optim", "no_load_rng", "log_throughput", "mock_data",
                     "use_flash_attn", "untie_embeddings_and_output_weights", "disable_bias_linear", "swiglu"), False),
    **dict.fromkeys(("lr", "min_lr", "lr_decay_style", "lr_warmup_iters", "lr_decay_iters", "train_iters", "seed",
                     "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "init_method_std",
                     "eval_iters", "eval_interval", "log_interval", "tokenizer_type", "tokenizer_model", "data_path",
                     "split", "save", "load", "tensorboard_dir", "wandb_project", "train_samples",
                     "transformer_impl"), True),
}  # fmt: skip

# Values that other projects have for a parameter's own
VALUES: Mapping[str, Mapping[str, Any]] = {
    "recompute": {"selective": "selective", "full": "full", "none": "none"},
    "dispatcher": {"flex": "deepep", "allgather": "alltoall"},
    "cuda_graphs": {"local": "full", "full_iteration": "full", "transformer_engine": "partial"},
    "cp_comm": {"allgather": "all_gather", "all_gather": "all_gather", "a2a+p2p": "a2a"},
    "stack": {**dict.fromkeys(("nemo", "megatron-bridge", "megatron-core", "megatron-lm", "mcore"), "megatron"),
              **dict.fromkeys(("hf", "transformers", "trl", "peft"), "huggingface")},
    "optimizer": {**dict.fromkeys(("adamw_bnb_8bit", "paged_adamw_8bit", "adamw_8bit", "adam8bit"), "adamw8bit"),
                  **dict.fromkeys(("adam", "adamw", "adamw_torch", "adamw_torch_fused", "distributed_fused_adam"),
                                  "adamw")},
    "schedule": {"interleaved1f1b": "interleaved", "zbvzerobubble": "zb-h1", "zero_bubble": "zb-h1",
                 "interleavedzerobubble": "zb-h1", "dualpipev": "dualpipe"},
}  # fmt: skip
# Settings of files that are no single parameter, or other names of one there
IN_FILES: Mapping[str, str] = {
    "activations_checkpoint_granularity": "recompute", "activations_checkpoint_method": "recompute_method",
    "activations_checkpoint_num_layers": "recompute_layers", "ub_tp_comm_overlap": "tp_overlap",
    "optim.name": "optimizer", "sequence_length": "seq", "sequence_parallel": "sequence_parallel",
    "encoder_seq_length": "seq",
    "num_nodes": "nodes", "devices": "gpus_per_node", "num_gpus_per_node": "gpus_per_node", "nnodes": "nodes",
    "enable_cuda_graph": "cuda_graphs", "peft.dim": "lora_rank", "peft.target_modules": "lora_targets",
    "target_modules": "lora_targets", "peft.adapter_dim": "lora_rank", "lora.dim": "lora_rank",
    "grad_reduce_in_fp32": "fp32_gradients", "accumulate_allreduce_grads_in_fp32": "fp32_gradients",
    "data_parallel_sharding_strategy": "sharding", "parallelism.data_parallel_shard_degree": "shard_degree",
    "parallelism.data_parallel_replicate_degree": "replicate_degree", "model.flavor": "flavor",
    "quantize.linear.float8.recipe_name": "precision", "quantize.linear.mx.recipe_name": "precision",
    "float8.recipe_name": "precision", "mx.recipe_name": "precision", "fp8_recipe": "precision",
    "overlap_param_gather": "overlap_param_gather", "fp8": "fp8", "fp8_format": "fp8", "fp4": "fp4",
    "fp4_format": "fp4",
    "mtp_num_layers": "mtp", "optimizer": "optimizer", "optimizer.name": "optimizer", "hf_path": "model",
    "hf_model_path": "model", "pretrained_model_name_or_path": "model", "packed_sequence": "packed",
    "compile.enable": "compile", "training.compile": "compile",
    "activation_checkpoint.selective_ac_option": "selective_option", "recompute_activations": "recompute_activations",
    "moe_router_force_load_balancing": "balanced", "moe_enable_deepep": "deepep", "use_megatron_fsdp": "fsdp",
    "use_custom_fsdp": "fsdp", "optimizer.optimizer": "optimizer",
}  # fmt: skip
# Settings that would change a step's time if they were read: reported where no rule knows them
MATTERS = re.compile(
    r"parallel|activations_checkpoint|fp8|fp4|mxfp|float8|recompute|checkpoint\.mode|selective_ac|offload|overlap|shard|batch|seq_len|"
    r"cuda_graph|capacity|dispatch|token_drop|lora|precision|zero|fsdp|pipeline|moe_(?!router|aux|z_loss|layer_freq)|"
    r"deepep|fusion|attention_backend|window|quantize|compile"
)
# Matched by that, and without effect: of the loss, of files, of how work is launched
HARMLESS = re.compile(
    r"save|load|eval|val_|tokenizer|dataset|logg|seed|fully_parallel|ckpt|_path$|checkpoint\.(enable|folder|interval)|"
    r"async_save|fp8_hybrid|drop_last|batch_sampler|pad|prefetch|amax|margin|fp8_e4m3|fp8_interval|first_last_layers|experimental|"
    r"distributed_(backend|timeout)|use_mpu|local_rank|process_group|nccl_|sharp|align_param_gather"
)


def value_called(parameter: str, value: Any) -> Any:
    """A parameter's own value for what other projects write."""
    known = VALUES.get(parameter, {})
    text = value.strip().lower() if isinstance(value, str) else value
    return known.get(text, value) if isinstance(text, str) else value
