"""TRL's names of settings, for whoever types them from habit. Names that TRL shares with Tandem are not listed.

docs/coming-from-trl.md has the names of GRPOConfig as a table; a test holds the two together.
"""

from collections.abc import Mapping

# TRL's and vLLM's name -> ours. A name that is ours in a group (`learning_rate`, `temperature`) is found without this.
RENAMED: Mapping[str, tuple[str, ...]] = {
    "model_name_or_path": ("model",),
    "model_revision": ("revision",),
    "torch_dtype": ("dtype",),
    "model_init_kwargs": ("model", "revision", "dtype"),
    "output_dir": ("run_dir",),
    "run_name": ("run",),
    "resume_from_checkpoint": ("resume",),
    "dataset_name": ("data.dataset",),
    "dataset_config": ("data.subset",),
    "dataset_train_split": ("data.split",),
    "dataset_test_split": ("data.eval_split",),
    "reward_funcs": ("rewards",),
    "reward_model_name_or_path": ("judging.model.path",),
    "steps_per_generation": ("minibatches",),
    "gradient_accumulation_steps": ("micro_batch_tokens",),
    "generation_batch_size": ("groups_per_step",),
    "per_device_train_batch_size": ("groups_per_step", "micro_batch_tokens", "batch_size"),
    "per_device_eval_batch_size": ("evaluation.batch_size",),
    "use_peft": ("lora.rank",),
    "lora_r": ("lora.rank",),
    "lora_alpha": ("lora.alpha",),
    "lora_target_modules": ("lora.target_modules",),
    "lr": ("optimizer.learning_rate",),
    "lr_scheduler_kwargs": ("optimizer.min_lr_rate",),
    "adam_beta1": ("optimizer.betas",),
    "adam_beta2": ("optimizer.betas",),
    "kl_coef": ("loss.beta",),
    "kl_beta": ("loss.beta",),
    "loss_type": ("loss.surrogate", "loss.aggregation", "loss.advantage"),
    "multi_objective_aggregation": ("loss.advantage",),
    "mask_truncated_completions": ("loss.truncated",),
    "use_bias_correction_kl": ("loss.kl_weight",),
    "max_new_tokens": ("sampling.max_completion_length",),
    "max_tokens": ("sampling.max_completion_length", "max_length"),
    "group_size": ("sampling.num_generations",),
    "vllm_importance_sampling_correction": ("loss.importance_sampling_correction",),
    "vllm_importance_sampling_mode": ("loss.importance_sampling_correction", "loss.correction_level"),
    "vllm_importance_sampling_cap": ("loss.correction_max", "loss.correction_high"),
    "vllm_importance_sampling_clip_max": ("loss.correction_max", "loss.correction_high"),
    "vllm_importance_sampling_clip_min": ("loss.correction_min", "loss.correction_low"),
    "off_policy_mask_threshold": ("loss.mask.off_policy_sequence",),
    "entropy_coef": ("loss.entropy.coef",),
    "use_adaptive_entropy": ("loss.entropy.target",),
    "entropy_target": ("loss.entropy.target",),
    "entropy_coef_delta": ("loss.entropy.delta",),
    "entropy_coef_min": ("loss.entropy.min",),
    "entropy_coef_max": ("loss.entropy.max",),
    "sync_ref_model": ("reference.sync_steps",),
    "ref_model_sync_steps": ("reference.sync_steps",),
    "ref_model_mixup_alpha": ("reference.decay",),
    "use_vllm": ("sampler",),
    "vllm_mode": ("sampler",),
    "vllm_server_base_url": ("vllm_url",),
    "vllm_server_host": ("vllm_url",),
    "vllm_server_port": ("vllm_url",),
    "vllm_gpu_memory_utilization": ("vllm.gpu_memory_utilization",),
    "vllm_max_model_length": ("vllm.max_model_len",),
    "vllm_tensor_parallel_size": ("vllm.tensor_parallel_size",),
    "use_cpu": ("device",),
    "bf16": ("dtype",),
    "optim": ("optimizer.learning_rate", "optimizer.betas", "optimizer.master_weights"),
}

_DEVICES = "`torchrun --nproc-per-node N -m policy_trainer train …` divides the policy among N GPUs (FSDP2)"
_HUB = "nothing is uploaded; RUN_DIR/model is a Hugging Face model, which `hf upload` takes"
_LOGGED = "every step is in RUN_DIR/metrics.jsonl; --report-to names trackers besides"

_PLAIN_LORA = "adapters are plain LoRA's, which vLLM and a merge can carry: leave it out"

# TRL's names of what there is nothing of here, and what to do instead.
ABSENT: Mapping[str, str] = {
    "deepspeed": f"{_DEVICES}; --optimizer.offload cpu is what its offload_optimizer is",
    "fsdp": _DEVICES,
    "fsdp_config": _DEVICES,
    "lora_dropout": "dropout would make the policy differ from itself: adapters have none",
    "lora_modules_to_save": "beside adapters no other weights are trained: --lora.rank 0 trains all of them",
    "use_dora": _PLAIN_LORA,
    "use_rslora": f"{_PLAIN_LORA}; --lora.alpha of alpha * sqrt(rank) is rsLoRA's scale",
    "load_in_4bit": "weights are not quantised: --dtype bfloat16 is the smallest",
    "fp16": "float16 would need loss scaling: use --dtype bfloat16",
    "trust_remote_code": "code from the Hub is never run",
    "use_liger_kernel": "log-probs are fused already; there is no Liger kernel",
    "push_to_hub": _HUB,
    "hub_model_id": _HUB,
    "logging_steps": _LOGGED,
    "logging_strategy": _LOGGED,
    "logging_first_step": _LOGGED,
    "save_strategy": "checkpoints come every --checkpoint.save-steps steps",
    "eval_strategy": "evaluations come every --evaluation.eval-steps steps; 0 keeps the first and the last",
    "remove_unused_columns": "columns that nothing uses are left alone",
}
