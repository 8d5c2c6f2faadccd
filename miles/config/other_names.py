"""What a setting was probably meant by a name that does not exist: one of another system's names for it, or one misspelt."""

import difflib
from collections.abc import Iterable, Mapping, Sequence

LEAST_SIMILAR = 0.5
OWN_BONUS = 0.15

MEANT = {
    "lr": "learning_rate actor_lr actor_learning_rate policy_lr optim_lr optimizer_lr peak_lr max_lr step_size",
    "critic_lr": "value_lr critic_learning_rate value_learning_rate",
    "lr_schedule": "lr_scheduler lr_scheduler_type scheduler scheduler_type lr_decay_style learning_rate_schedule",
    "lr_warmup_steps": "warmup warmup_steps num_warmup_steps lr_warmup_iters lr_warmup_fraction warmup_ratio lr_warmup_steps_ratio",
    "min_lr": "lr_min min_learning_rate end_lr final_lr",
    "weight_decay": "wd l2 decay",
    "adam_beta1": "beta1 betas adam_betas",
    "adam_beta2": "beta2",
    "adam_eps": "adam_epsilon epsilon_adam optimizer_eps",
    "max_grad_norm": "grad_clip gradient_clipping clip_grad clip_grad_norm gradient_clip_val grad_norm",
    "rollout_batch_size global_batch_size": "batch_size train_batch_size bs",
    "rollout_batch_size": "num_prompts prompts_per_step prompts_per_rollout gen_batch_size generation_batch_size num_prompts_per_step",
    "global_batch_size": "mini_batch_size ppo_mini_batch_size minibatch_size num_mini_batches steps_per_generation num_iterations "
    "num_steps_per_rollout num_minibatches",
    "max_tokens_per_micro_batch": "micro_batch_size per_device_train_batch_size per_device_batch_size ppo_micro_batch_size "
    "ppo_micro_batch_size_per_gpu max_tokens_per_gpu gradient_accumulation_steps gradient_accumulation accumulate_grad_batches",
    "n_samples_per_prompt": "group_size num_generations num_samples num_samples_per_prompt samples_per_prompt n_samples n_rollouts "
    "rollouts_per_prompt rollout_n num_return_sequences best_of completions_per_prompt n",
    "eval_samples_per_prompt": "n_samples_per_eval_prompt eval_n eval_num_samples num_eval_samples",
    "num_epoch": "num_epochs epochs num_train_epochs total_epochs n_epochs max_epochs",
    "num_rollout": "max_steps num_steps total_steps train_steps num_training_steps total_training_steps num_rollouts num_iters iterations "
    "max_train_steps num_updates steps",
    "max_response_length": "max_tokens max_new_tokens max_completion_length max_completion_tokens max_gen_len max_length response_length "
    "rollout_max_response_len max_response_len max_output_tokens max_output_length generate_max_len",
    "eval_max_response_length": "eval_max_response_len eval_max_tokens eval_max_new_tokens",
    "max_prompt_length": "max_prompt_len max_input_length prompt_length prompt_max_len rollout_max_prompt_len max_prompt_tokens",
    "engine_max_context": "max_model_len max_seq_len max_seq_length seq_length seq_len context_length max_context_len context_window",
    "engine_max_running": "max_running_requests max_num_seqs max_concurrency max_batch_size",
    "engine": "backend rollout_backend inference_backend inference_engine use_vllm use_sglang rollout_engine",
    "num_engines": "num_inference_engines vllm_num_engines rollout_num_engines rollout_num_gpus num_rollout_workers data_parallel_size",
    "gpus_per_engine": "tensor_parallel_size tp tp_size rollout_num_gpus_per_engine vllm_tensor_parallel_size",
    "num_trainers": "world_size num_gpus num_gpus_per_node n_gpus_per_node nproc_per_node actor_num_gpus_per_node num_workers "
    "num_processes",
    "sglang": "gpu_memory_utilization mem_fraction_static sglang_mem_fraction_static attention_backend",
    "kl_loss_coef": "beta kl_beta kl_weight kl_penalty_coef kl_loss_weight init_kl_coef use_kl_loss use_kl",
    "kl_coef": "kl kl_penalty kl_reward_coef reward_kl_coef",
    "kl_estimator": "kl_loss_type kl_type",
    "eps_clip": "clip_range clip_ratio cliprange clip_eps clip_epsilon clip epsilon ppo_clip clip_param eps clip_ratio_low epsilon_low",
    "eps_clip_high": "clip_ratio_high epsilon_high clip_higher clip_high",
    "value_clip": "clip_range_vf clip_range_value cliprange_value value_clip_range vf_clip",
    "dual_clip": "clip_ratio_c eps_clip_c delta",
    "entropy_coef": "entropy_coeff ent_coef entropy entropy_loss_coef entropy_weight entropy_bonus",
    "advantage_estimator": "algo algorithm adv_estimator algo_name estimator rl_algorithm",
    "policy_loss": "loss_type loss_mode loss_fn policy_loss_type",
    "loss_aggregation": "loss_agg_mode loss_reduction calculate_per_token_loss token_level_loss",
    "grpo_std_normalization": "scale_rewards norm_adv_by_std_in_grpo std_normalization normalize_std disable_grpo_std_normalization",
    "normalize_advantages": "whiten_advantages advantage_normalization norm_adv whiten_rewards",
    "gae_lambda": "lam lambd lambda gae_lam",
    "gamma": "discount discount_factor",
    "use_tis": "tis importance_sampling truncated_importance_sampling vllm_importance_sampling_correction rollout_is rollout_correction",
    "tis_clip": "tis_imp_ratio_cap tis_threshold vllm_importance_sampling_cap rollout_is_threshold imp_ratio_cap",
    "max_weight_staleness": "max_staleness staleness max_lag off_policy_steps max_head_offpolicyness staleness_threshold async_level "
    "max_async_level max_off_policy_steps",
    "fully_async": "async asynchronous async_mode async_training",
    "update_weights_interval": "sync_interval sync_every weight_sync_interval update_weight_interval weight_sync_steps sync_steps "
    "ref_model_sync_steps",
    "weight_transport": "weight_sync_backend weight_sync_method sync_backend",
    "hf_checkpoint": "model model_name model_name_or_path model_path model_id pretrained pretrain checkpoint base_model actor_model",
    "ref_checkpoint": "ref_model ref_model_path reference_model ref_load ref_policy ref",
    "critic_checkpoint": "critic_model critic_model_path value_model critic_pretrain critic_load",
    "teacher_checkpoint": "teacher teacher_model teacher_model_path",
    "dtype": "torch_dtype precision bf16 fp16 bfloat16 float16 mixed_precision half use_bf16 model_dtype",
    "attn_implementation": "flash_attention use_flash_attn flash_attn attention attention_implementation",
    "gradient_checkpointing": "activation_checkpointing recompute enable_gradient_checkpointing recompute_activations",
    "offload_train": "cpu_offload param_offload optimizer_offload offload offload_optimizer",
    "lora_rank": "lora_r lora use_lora peft use_peft lora_dim r",
    "lora_targets": "target_modules lora_target_modules lora_modules",
    "prompt_data": "data data_path dataset dataset_name dataset_path train_data train_file train_files train_dataset prompts data_files "
    "train_data_path",
    "eval_data": "eval_dataset val_data val_files eval_file validation_data test_data eval_prompt_data eval_files valid_data val_dataset",
    "prompt_key": "input_key prompt_column question_key input_field prompt_field question",
    "label_key": "answer_key label_column answer_field target_key ground_truth_key solution_key response_key",
    "skip_eval_before_train": "val_before_train eval_on_start eval_before_train",
    "eval_interval": "eval_steps eval_freq eval_every test_freq val_interval evaluation_interval val_check_interval val_period eval_period",
    "save_interval": "save_steps save_freq save_every checkpoint_interval ckpt_interval save_period checkpoint_every",
    "save": "output_dir save_path save_dir checkpoint_dir ckpt_dir default_local_dir output out_dir",
    "load": "resume_from resume_from_checkpoint load_path resume_path load_checkpoint ckpt_path resume_mode",
    "keep_checkpoints": "save_total_limit max_to_keep keep_last max_ckpt_num max_actor_ckpt_to_keep",
    "trackers": "report_to logger loggers use_wandb wandb use_tensorboard tensorboard log_with tracker use_mlflow mlflow",
    "tracking_project": "wandb_project project project_name",
    "name": "run_name experiment_name exp_name wandb_run_name job_name wandb_name",
    "run_root": "log_dir logging_dir runs_dir run_dir work_dir",
    "reward": "reward_fn reward_function reward_funcs rm_type reward_type custom_rm_path reward_model reward_manager "
    "custom_reward_function",
    "reward_url": "rm_url remote_rm_url",
    "generate_function": "custom_generate_function_path rollout_fn generate_fn agent_loop",
    "tool_functions": "tools tool_config_path",
    "max_turns": "max_assistant_turns max_user_turns num_turns multi_turn max_steps_per_episode",
    "group_filter": "dynamic_sampling dynamic_sampling_filter_path filter_groups use_dynamic_sampling",
    "temperature": "temp sampling_temperature rollout_temperature",
    "top_p": "rollout_top_p nucleus topp",
    "stop": "stop_strings stop_words rollout_stop stop_sequences eos",
    "stop_token_ids": "eos_token_id rollout_stop_token_ids stop_tokens",
    "shuffle": "rollout_shuffle shuffle_data shuffle_dataset",
    "seed": "random_seed rollout_seed data_seed",
    "ray_address": "ray_init_address address cluster",
    "device": "cuda gpu use_gpu use_cuda no_cuda cpu accelerator",
    "console": "verbose quiet progress disable_tqdm",
    "stall_timeout": "watchdog_timeout hang_timeout nccl_timeout ddp_timeout",
}
"""Settings -> what they, or something that is set through them, are called elsewhere."""

_MEANT_BY = {name: settings.split() for settings, names in MEANT.items() for name in names.split()}


def meant_by(word: str) -> list[str]:
    """The settings that another system calls so: {"optim.learning-rate": ["lr"]}; most words are none."""
    return _MEANT_BY.get(word.strip("-").rpartition(".")[2].lower().replace("-", "_"), [])


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was probably meant: one that begins like it, else the most similar one."""
    candidates = list(known)
    begins = [name for name in candidates if len(word.lstrip("-")) > 2 and name.startswith(word)]
    return next(iter(begins or difflib.get_close_matches(word, candidates, 1, cutoff=0.5)), None)


def nearest_key(word: str, table: str, sections: Mapping[str, str]) -> str | None:
    """The settings that a key of a TOML table probably means, with their tables where that is another one.

    Args:
        sections: setting -> its table.
    """
    own = [name for name, section in sections.items() if section == table]
    close = difflib.get_close_matches(word, own, 1, cutoff=0.8)
    found = close or meant_by(word) or _similar(word, own, sections)
    return " or ".join(name if not table or sections[name] == table else f"{name} below [{sections[name]}]" for name in found) or None


def _similar(word: str, own: Sequence[str], known: Iterable[str]) -> list[str]:
    """The most similar setting; one of the table's own is preferred to a somewhat more similar one elsewhere."""
    score = {name: difflib.SequenceMatcher(None, word, name).ratio() + OWN_BONUS * (name in own) for name in known}
    best = max(score, key=lambda name: score[name])
    return [best] if score[best] > LEAST_SIMILAR + OWN_BONUS * (best in own) else []
