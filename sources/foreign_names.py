"""
Names of settings in other systems: they are not accepted as flags, since their meaning often differs, but an
error names the flag here and the difference.
"""

import difflib
import re
from collections.abc import Iterable

# Names of TRL, verl, tunix, ReLax, StateSet and earlier versions here, and what to write instead. A name with
# a dot is the last part of one of verl's.
ANSWERS = {
    "model model_name model_name_or_path model.path": "--model_path",
    "model_size": "--model_path with the id, such as google/gemma-3-270m-it for 270m",
    "apply_chat_template_kwargs enable_thinking": "--chat_template_kwargs, as JSON",
    "dataset_name dataset_path train_files train_data": "--dataset, a file or a hub id (name:configuration)",
    "val_files eval_dataset_path": "--eval_dataset",
    "dataset_train_split dataset_test_split": "--train_split, --eval_split",
    "prompt_key": "--prompt_column",
    "filter_overlong_prompts truncation": "--long_prompts drop or error",
    "shuffle_dataset": "--shuffle",
    "num_generations group_size rollout.n n": "--num_completions_per_prompt",
    "rollout_batch_size train_batch_size": "--batch_size, prompts of a rollout",
    "per_device_train_batch_size steps_per_generation":
        "--batch_size, prompts of a rollout: per_device_train_batch_size x processes x steps_per_generation "
        "(gradient_accumulation_steps unless given) / num_generations",
    "gradient_accumulation_steps micro_batch_size train_micro_batch_size ppo_micro_batch_size "
    "ppo_micro_batch_size_per_gpu log_prob_micro_batch_size_per_gpu ppo_max_token_len_per_gpu":
        "--max_tokens_per_forward, tokens of a pass: it bounds memory and never changes the gradient",
    "mini_batch_size ppo_mini_batch_size":
        "--minibatch_size, in completions (prompts there): times --num_completions_per_prompt",
    "num_iterations":
        "--ppo_epochs for TRL's and tunix' (passes over a rollout); for ReLax' (rollouts) --max_steps, which "
        "counts optimiser steps: times ppo_epochs x completions of a rollout / minibatch_size",
    "num_batches num_episodes total_training_steps":
        "--max_steps, which counts optimiser steps: rollouts times updates on each",
    "num_train_epochs total_epochs": "--num_epochs",
    "max_new_tokens max_completion_length max_response_length max_tokens_to_generate":
        "--generation_max_length",
    "temperature": "--generation_temperature, in sampling and in training",
    "top_p": "--generation_top_p, in sampling and in training",
    "min_p": "--generation_min_p, in sampling and in training",
    "top_k": "--generation_top_k, in sampling and in training; 0 keeps all (-1 in verl)",
    "beta kl_coef kl_loss_coef kl_beta":
        "--kl_penalty_coef, 0.01 unless given, with another --kl_estimator than the usual k3",
    "use_reference_model use_kl_loss": "--use_kl_penalty",
    "kl_loss_type kl_penalty": "--kl_estimator (low_var_kl is k3)",
    "use_kl_in_reward": "--kl_in reward",
    "kl_ctrl target_kl kl_target max_policy_kl":
        "not offered: the weight of the KL penalty is constant, and --ppo_epochs fixes the number of updates",
    "sync_ref_model ref_model_sync_steps": "--reference_mode ema or periodic, --reference_update_freq",
    "ref_model_mixup_alpha":
        "--ema_alpha, the share of the old reference that stays: 1 - ref_model_mixup_alpha",
    "advantage_epsilon": "always 1e-8: leave it out",
    "epsilon eps": "--clip_low and --clip_high; added to the divisor of advantages, always 1e-8",
    "clip_ratio clip_ratio_low clip_range clip_eps": "--clip_low and --clip_high, on probability ratios",
    "epsilon_high clip_ratio_high": "--clip_high",
    "delta clip_ratio_c": "--loss_options dual_clip=3",
    "vllm_importance_sampling_cap vllm_importance_sampling_clip_max rollout_is_threshold": "--importance_cap",
    "advantage_normalization scale_rewards norm_adv_by_std_in_grpo":
        "--normalize_advantages, --advantage_scale batch",
    "baseline_type": "--baseline; for learned, --use_value_head",
    "adv_estimator": "--baseline (rloo: leave_one_out); for gae, --use_value_head",
    "loss_agg_mode loss_aggregation":
        "--loss_type, which has its own: grpo averages over completions, dapo over tokens, scale_rl over "
        "prompts, dr_grpo divides by the length limit",
    "loss_algo importance_sampling_level": "--loss_type, such as gspo",
    "mask_truncated_completions": "--overlong mask",
    "filter_groups": "--dynamic_sampling, rounds of sampling",
    "entropy_coeff": "--entropy_coef",
    "reward_funcs reward_fns reward_fn custom_reward_function":
        "--reward_functions, names or file.py:function; from Python train(config, reward_functions=[f])",
    "gamma": "--gae_gamma",
    "lam gae_lam": "--gae_lambda",
    "cliprange_value value_clip": "not offered: the clip of values is 0.2 with --use_value_head",
    "value_coef": "not offered: the weight of the value loss is 0.1 with --use_value_head",
    "max_tool_calling_iterations": "--max_turns, one more: it counts messages of the policy",
    "tools multi_turn environment_factory": "--environment and --max_turns",
    "lr optim.lr actor_learning_rate": "--learning_rate",
    "lr_scheduler_type lr_schedule_type warmup_style": "--lr_schedule constant, linear or cosine",
    "warmup_steps lr_warmup_steps lr_warmup_steps_ratio": "--warmup_ratio, a share of the steps",
    "grad_clip": "--max_grad_norm",
    "optim adam_8bit adam_beta2 weight_decay":
        "AdamW with beta2 0.95, without weight decay; another one from Python: train(config, optimizer=...)",
    "bf16 fp16 dtype torch_dtype": "--precision bfloat16 or float16",
    "use_lora use_peft lora_r peft_config": "--lora_rank, 0 for none",
    "lora_target_modules lora_dropout": "--lora_rank: adapters of all linear layers, without dropout",
    "enable_gradient_checkpointing remat": "--gradient_checkpointing",
    "mesh_shape tensor_model_parallel_size fsdp fsdp_size":
        "--mesh fsdp=M,tp=N, with torchrun for several processes",
    "n_gpus_per_node nnodes": "torchrun, a process for each GPU",
    "eval_interval eval_every_n_steps test_freq eval_strategy": "--eval_steps",
    "save_interval save_freq save_strategy": "--save_steps",
    "load_best_model_at_end": "--keep_best writes best/; final/ stays the last policy",
    "save_total_limit max_to_keep": "--keep_checkpoints",
    "log_completions num_completions_to_print": "--log_rollouts_every",
    "use_wandb logger": "--report_to wandb, tensorboard or none",
    "run_name logging_dir default_local_dir checkpoint_dir ckpt_dir": "--output_dir",
    "resume_from_checkpoint resume_mode": "--resume with --output_dir",
    "prompt input": "--question",
    "chat interactive": "`transformers chat FOLDER`, beside `transformers serve` (README.md)",
    "questions answers": "--evaluate FILE --json OUT, also for prompts without answers",
    "against_model": "--evaluate for each of the models",
    "merge_into": "three lines of peft (docs/scale.md, LoRA)",
    "use_vllm vllm_mode": "--engine vllm, in the process of the trainer",
    "vllm_gpu_memory_utilization gpu_memory_utilization": "--engine_memory",
    "load_in_4bit load_in_8bit": "not offered: weights are float32",
    "early_stopping patience auto_adjust": "not offered; the training doctor gives advice at the end",
    "repetition_penalty": "not offered: log-probabilities of training would differ",
    "explain": "`python -m analysis.explain` with the flags of train.py",
    "replay": "not offered: train again with the other flags",
    "compare": "one run for each variant and seed; infer.py reports several runs in one table",
}
FOREIGN = {name: here for names, here in ANSWERS.items() for name in names.split()}


def explain_unknown(typed: Iterable[str], known: Iterable[str]) -> str:
    """Return a sentence about names that are no flags: the flag for the same in a system that has the name.

    typed  as on a command line or in a file: num_generations, --beta, actor_rollout_ref.rollout.n=8
    known  the names of flags
    """
    known, answers = set(known), []
    for word in typed:
        name = word.lstrip("-").partition("=")[0]
        suffixes = [name[match.end() :] for match in re.finditer(r"^|\.", name)]     # a.b.c, b.c, c
        near = difflib.get_close_matches(suffixes[-1], [*known, *FOREIGN], n=1, cutoff=0.8)      # misspelt
        found = next((suffix for suffix in [*suffixes, *near] if suffix in known | FOREIGN.keys()), "")
        flags = set(re.findall(r"--(\w+)", FOREIGN.get(found, "")))
        if found in known:
            answers.append(f"{word}: unknown flag; did you mean --{found}?")
        elif found and (not flags or flags & known):
            answers.append(f"{word}: unknown flag; here {FOREIGN[found]}")
        else:
            answers.append(f"{word}: unknown flag; see --help")
    return " | ".join(answers)
