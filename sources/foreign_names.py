"""
Names of settings in other systems. They are not accepted as flags, since their meaning often differs, but an
error names our flag and the difference.
"""

import difflib
import re
from collections.abc import Iterable

# Names in TRL, verl, tunix, ReLax, StateSet and earlier versions -> what to write instead. A name with a dot
# is the last part of a name in verl. Ends of our names, such as temperature, need no entry.
ANSWERS = {
    "model model_name model_name_or_path model.path": "--model_path",
    "model_size": "--model_path with the id, such as google/gemma-3-270m-it for 270m",
    "dataset_name dataset_path train_files": "--dataset, a file or a hub id (name:configuration)",
    "val_files": "--eval_dataset",
    "dataset_train_split dataset_test_split": "--train_split, --eval_split",
    "system_prompt system_message": "--instruction, before every prompt, or a system message in the prompts",
    "filter_overlong_prompts truncation": "--long_prompts drop or error",
    "num_generations group_size rollout.n n": "--num_completions_per_prompt",
    "rollout_batch_size train_batch_size": "--batch_size, prompts per rollout",
    "per_device_train_batch_size steps_per_generation":
        "--batch_size, prompts per rollout on all processes; a batch in TRL counts completions",
    "gradient_accumulation_steps micro_batch_size ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu":
        "--max_tokens_per_forward, tokens per forward pass: limits memory, never changes the gradient",
    "ppo_mini_batch_size": "--minibatch_size, in completions: prompts times --num_completions_per_prompt",
    "num_iterations":
        "--ppo_epochs for TRL's and tunix' (epochs on a rollout); for ReLax' (rollouts) --max_steps, which "
        "counts optimiser steps: multiply by ppo_epochs x completions per rollout / minibatch_size",
    "num_batches num_episodes total_training_steps": "--max_steps, which counts optimiser steps",
    "num_train_epochs total_epochs": "--num_epochs",
    "max_new_tokens max_completion_length max_response_length": "--generation_max_length",
    "beta kl_coef kl_loss_coef": "--kl_penalty_coef, with another --kl_estimator than the usual k3",
    "use_reference_model use_kl_loss": "--use_kl_penalty",
    "kl_loss_type kl_penalty": "--kl_estimator (low_var_kl is k3)",
    "use_kl_in_reward": "--kl_in reward",
    "kl_target kl_horizon max_policy_kl": "--kl_penalty_coef, which is constant, and fewer --ppo_epochs",
    "sync_ref_model ref_model_sync_steps": "--reference_mode ema or periodic, --reference_update_freq",
    "advantage_epsilon": "always 1e-8: remove it",
    "epsilon": "--clip_low and --clip_high; added to the divisor of advantages, always 1e-8",
    "clip_ratio clip_ratio_low": "--clip_low and --clip_high, on probability ratios",
    "epsilon_high clip_ratio_high": "--clip_high",
    "delta clip_ratio_c dual_clip": "--loss_options dual_clip=3",
    "advantage_normalization scale_rewards": "--normalize_advantages, --advantage_scale batch",
    "baseline_type adv_estimator": "--baseline (rloo: leave_one_out); for learned or gae, --use_value_head",
    "loss_agg_mode loss_aggregation": "--loss_type: dapo averages over tokens, grpo over completions",
    "mask_truncated_completions": "--overlong mask",
    "reward_funcs custom_reward_function": "--reward_functions, names or file.py:function",
    "value_clip value_coef": "not supported: with --use_value_head they are 0.2 and 0.1",
    "tools multi_turn": "--environment and --max_turns",
    "lr optim.lr": "--learning_rate",
    "lr_scheduler_type warmup_style": "--lr_schedule constant, linear or cosine",
    "warmup_steps lr_warmup_steps lr_warmup_steps_ratio": "--warmup_ratio, a share of the steps",
    "optim adam_8bit adam_beta2 weight_decay":
        "always AdamW with beta2 0.95, without weight decay; others in Python: train(config, optimizer=...)",
    "bf16 fp16 dtype torch_dtype": "--precision bfloat16 or float16",
    "use_peft lora_r lora_target_modules": "--lora_rank, 0 for none: adapters of all linear layers",
    "mesh_shape tensor_model_parallel_size fsdp": "--mesh fsdp=M,tp=N, with torchrun for several processes",
    "test_freq eval_strategy": "--eval_steps",
    "save_freq save_strategy": "--save_steps",
    "save_total_limit max_to_keep": "--keep_checkpoints",
    "log_completions": "--log_rollouts_every",
    "run_name logging_dir default_local_dir": "--output_dir",
    "resume_from_checkpoint resume_mode": "--resume with --output_dir",
    "enable_thinking": "--chat_template_kwargs, as JSON",
    "chat_template_date": "always 26 Jul 2024, if the template has no variable for --chat_template_kwargs",
    "importance_sampling_level": "--loss_type gspo for sequence",
    "vllm_importance_sampling_cap rollout_is_threshold": "--importance_cap",
    "ref_model_mixup_alpha": "--ema_alpha, the share of the old reference: 1 - ref_model_mixup_alpha",
    "filter_groups": "--dynamic_sampling, extra rounds of sampling",
    "load_best_model_at_end": "--keep_best writes best/; final/ stays the last policy",
    "use_wandb logger": "--report_to wandb, tensorboard or none",
    "n_gpus_per_node nnodes": "torchrun, with one process per GPU",
    "repetition_penalty": "not supported: log-probabilities in training would differ",
    "chat interactive": "`transformers chat FOLDER`, beside `transformers serve` (README.md)",
    "questions answers": "--evaluate FILE --json OUT, also for prompts without answers",
    "against_model": "--evaluate for each of the models",
    "merge_into": "three lines of peft (docs/scale.md, LoRA)",
    "use_vllm vllm_mode": "--engine vllm, in the process of the trainer",
    "vllm_gpu_memory_utilization gpu_memory_utilization": "--engine_memory",
    "load_in_4bit load_in_8bit": "not supported: weights are float32",
    "explain": "`python -m analysis.explain` with the flags of train.py",
    "replay": "not supported: train again with the other flags",
    "compare": "one run for each variant and seed; infer.py reports several runs in one table",
}
FOREIGN = {name: here for names, here in ANSWERS.items() for name in names.split()}


def explain_unknown(typed: Iterable[str], known: Iterable[str]) -> str:
    """Return a sentence about unknown flags: for names in other systems, the corresponding flag.

    typed  num_generations, --beta, actor_rollout_ref.rollout.n=8, ...;  known  the names of flags
    """
    known, answers = list(known), []
    names = [*known, *FOREIGN]
    for word in typed:
        parts = word.lstrip("-").partition("=")[0].split(".")
        longer = [name for name in known if name.endswith(f"_{parts[-1]}")]
        misspelt = difflib.get_close_matches(parts[-1], names, n=1, cutoff=0.8)
        candidates = [".".join(parts[-2:]), parts[-1], *longer, *misspelt]
        found = next((name for name in candidates if name in names), "")
        here = FOREIGN.get(found, "")
        flags = set(re.findall(r"--(\w+)", here))
        answer = f"here {here}" if here and (not flags or flags & {*known}) else "see --help"
        answers.append(f"{word}: unknown flag; {f'did you mean --{found}?' if found in known else answer}")
    return " | ".join(answers)
