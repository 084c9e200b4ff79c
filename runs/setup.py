"""
From settings to a run, or to one line that tells which setting to change.

Cheap checks come first: config.py rejects what needs no reading, then reward functions are imported, data read, the tokenizer
loaded and the prompts measured; the model comes last, and the start-up check after it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from config import Config
from engine.devices import best_device, keep_freed_memory, num_processes
from engine.sharding import gathered_weights, shard, sharded_like
from environments.conversations import EnvironmentRaised
from environments.loading import load_environment, refuse_missing_columns
from model import (
    AdapterReference, check_context_length, copy_into, layers_of, load_policy, load_tokenizer, move, recompute_activations,
)
from reward_functions.calling import RewardError
from reward_functions.loading import missing_columns, name_of
from rewards import load_reward_function
from runs.checkpoint import latest_checkpoint
from runs.folder import RunFolder
from runs.memory_estimate import describe_step
from runs.phases import adam_8bit, plan_phases
from runs.run import Progress, Run
from runs.startup_check import check_setup
from runs.training_data import fit_prompts, load_data, validate_demonstrations


def load_reward_functions(config: Config) -> list[Callable]:
    """Return the reward functions of a GRPO run, in order; none for supervised training."""
    if not config.training.use_grpo:
        return []
    functions = [load_reward_function(name) for name in config.grpo.reward_functions]
    names = [name_of(function) for function in functions]
    if len(set(names)) < len(names):
        raise ValueError(f"--reward_functions {' '.join(config.grpo.reward_functions)}: two have the same name; rename one")
    return functions


def validate_grpo_setup(config: Config, tokenizer, dataset: Sequence[dict]) -> None:
    """Raise ValueError, one line, for a GRPO run that cannot work. dataset: examples, each with at least a prompt."""
    size = config.grpo.num_completions_per_prompt
    if size < 2:
        raise ValueError(f"--num_completions_per_prompt={size}: GRPO compares siblings, so it needs at least 2")
    if tokenizer is None or tokenizer.pad_token_id is None or tokenizer.eos_token_id is None:
        raise ValueError("GRPO needs a tokenizer with pad_token and eos_token, to batch completions and to end them")
    if not dataset or not all("prompt" in example for example in dataset):
        raise ValueError(f"--dataset={config.data.dataset}: every example needs a prompt")
    columns = {name for example in dataset for name in example}
    for name in config.grpo.reward_functions:
        if missing := missing_columns(load_reward_function(name), columns):
            raise ValueError(
                f"--reward_functions {name}: needs the column {missing[0]}, which {config.data.dataset} does not have "
                f"(columns: {', '.join(sorted(columns))})"
            )
    refuse_missing_columns(config.grpo.environment, load_environment(config.grpo.environment), dataset)


def start_up_check(model, tokenizer, examples: list[dict], config: Config, functions: list, environment, notify: Callable) -> bool:
    """Run the start-up check; print notes, with --check everything. Raises ValueError if a check failed.

    returns  whether completions can share their prompt
    """
    try:
        with gathered_weights(model):
            findings = check_setup(
                model, tokenizer, examples, config.grpo, functions, environment, share=config.training.shared_prompt == "auto"
            )
    except RewardError as error:
        raise ValueError(f"--reward_functions {' '.join(config.grpo.reward_functions)}: {error}") from error
    except EnvironmentRaised as error:
        raise ValueError(f"--environment: {error}") from error
    for finding in findings:
        if config.training.check or (finding.ok is not True and finding.name != "row 0"):
            mark = {True: "ok", False: "BROKEN", None: "note"}[finding.ok]
            notify(f"  {mark:<6} {finding.name:<12} {finding.found}")
    broken = [finding for finding in findings if finding.ok is False]
    if broken:
        raise ValueError(f"start-up check: {broken[0].name}: {broken[0].found}; {broken[0].fix}")
    packing = next(finding for finding in findings if finding.name == "packing")
    agreements = ", ".join(f"{f.name} ok" for f in findings if f.ok)
    notify(f"start-up check: {agreements}")
    return bool(packing.ok)


def set_up(config: Config) -> Run:
    """Prepare everything that comes before the first step. Raises ValueError, one line, for what the user has to change."""
    device = best_device()
    keep_freed_memory()
    training = config.training
    if device.type == "xla" and config.model.precision == "float16":
        raise ValueError("--precision=float16: on XLA its loss would not be scaled; take bfloat16")
    if training.adam_8bit:
        adam_8bit()
    mesh = parse_mesh(config)
    if not training.max_tokens_per_forward:               # written to config.json, so a resumed run uses the same number
        tokens = max(2048 if device.type == "cpu" else 8192, 2 * config.data.max_prompt_length)
        training = replace(training, max_tokens_per_forward=tokens)
        config = replace(config, training=training)
    folder = RunFolder(config)
    reward_functions, environment = load_reward_functions(config), load_environment(config.grpo.environment)
    train_set, eval_set = load_data(config)
    validate_demonstrations(config, train_set)
    checkpoint = find_checkpoint(config, folder) if training.resume else None
    model_config = replace(config.model, model_path=str(checkpoint)) if checkpoint else config.model
    tokenizer = load_tokenizer(model_config)
    tokenizer.tools = getattr(environment, "tools", None)                        # for its chat template
    if training.use_grpo:
        validate_grpo_setup(config, tokenizer, train_set)
    train_set, longest_prompt = fit_prompts(train_set, tokenizer, config, folder.print)
    eval_set, longest_held_out = fit_prompts(eval_set, tokenizer, config, folder.print)

    torch.manual_seed(training.seed)
    model, _ = load_policy(model_config)
    move(model, device)
    if training.gradient_checkpointing:
        recompute_activations(model)
    shard(model, layers_of(model), mesh)
    check_context_length(model, max(longest_prompt, longest_held_out), config.grpo.generation_max_length)
    phases = plan_phases(config, len(train_set))
    folder.describe(model, device, phases, len(train_set), len(eval_set))
    shared_prompt = start_up_check(model, tokenizer, train_set, config, reward_functions, environment, folder.print)
    run = Run(
        config, folder, device, tokenizer, reward_functions, environment, train_set, eval_set, phases, shared_prompt, model,
        Progress(kl_coef=config.grpo.kl_coef),
    )
    if training.use_grpo:
        examples = train_set[:2]
        for line in describe_step(model, tokenizer, examples, config, longest_prompt=longest_prompt, shared_prompt=shared_prompt):
            folder.print(line)
    if checkpoint:
        run.restore(checkpoint)
        run.reference = load_reference(model, config, checkpoint, run.saved_state)
    return run


def find_checkpoint(config: Config, folder: RunFolder) -> Path | None:
    """Return the checkpoint to resume from, None to begin anew. Raises ValueError if the settings do not fit it."""
    checkpoint = latest_checkpoint(folder.path, folder.print)
    if not checkpoint and (folder.path / "final").exists():
        raise ValueError(f"--resume: {folder.path} is complete and its checkpoints are gone; take its final as --model_path")
    folder.print(f"resuming {folder.path} from {checkpoint or 'its beginning: there is no checkpoint yet'}")
    if checkpoint:
        compare_settings(config, checkpoint, folder.print)
    return checkpoint


def compare_settings(config: Config, checkpoint: Path, notify: Callable) -> None:
    """Print which settings of a resumed run have changed; raise ValueError for changes that its state does not fit."""
    state = torch.load(checkpoint / "state.pt", weights_only=True, map_location="cpu", mmap=True)
    saved, now = ({name: value for part in settings.values() for name, value in part.items()}
                  for settings in (state["settings"], config.as_dict()))
    for settings in saved, now:
        settings["use_kl_penalty"] = settings["use_kl_penalty"] and settings["kl_penalty_coef"] > 0
    changed = [name for name in now if name != "output_dir" and now[name] != saved.get(name, now[name])]
    fixed = ["use_grpo", "model_path", "lora_rank", "lora_alpha", "profile", "cold_start_steps"]
    if "optimizer" in state:                              # saved within a phase
        fixed += ["adam_8bit"]
        in_grpo = saved["use_grpo"] and state["progress"]["phase"] == (saved["cold_start_steps"] > 0)
        fixed += ["use_value_head", "use_kl_penalty"] * in_grpo
    for name in fixed:
        if name in changed:
            raise ValueError(
                f"--{name}={now[name]}: this run began with {saved[name]!r}; start a new one instead, from a checkpoint as "
                "--model_path"
            )
    if changed:
        notify("  note   changed: " + ", ".join(f"{name} {saved[name]} -> {now[name]}" for name in changed))


def load_reference(model, config: Config, checkpoint: Path, state: dict):
    """Return the reference saved with a checkpoint; None if there is none or no KL penalty. state: of its state.pt."""
    adapter = state.get("reference_adapter")
    if config.grpo.kl_coef and adapter:
        reference = AdapterReference(model)
        copy_into(reference.kept, [sharded_like(new, old) for new, old in zip(adapter, reference.kept, strict=True)])
        return reference
    if not config.grpo.kl_coef or not (checkpoint / "reference").exists():
        return None
    reference, _ = load_policy(replace(config.model, model_path=str(checkpoint / "reference")))
    reference = move(reference, torch.device("cpu") if config.grpo.reference_offload else model.device).eval()
    shard(reference, layers_of(reference), getattr(model, "mesh", {}))
    return reference.requires_grad_(False)


def parse_mesh(config: Config) -> dict[str, int]:
    """Return the device mesh for shard: all processes in one dimension, or as --mesh says. Raises ValueError."""
    processes, text = num_processes(), config.training.mesh
    sizes = [part.partition("=") for part in text.split(",")] if text else [("fsdp", "=", str(processes))]
    mesh = {"replicate": 1, "fsdp": 1, "tp": 1}
    mesh |= {name.strip(): int(size) if size.strip().isdigit() else 0 for name, _, size in sizes}
    if len(mesh) > 3 or math.prod(mesh.values()) != processes:
        raise ValueError(
            f"--mesh={text}: write some of replicate=K,fsdp=M,tp=N; K * M * N is the number of processes, here {processes}"
        )
    several = {
        "reference_offload": config.grpo.reference_offload, "precision": config.model.precision == "float16",
        "explain": config.training.explain, "adam_8bit": config.training.adam_8bit,
    }
    for name in several:
        if several[name] and processes > 1:
            raise ValueError(f"--{name}: not in several processes; leave it out, or take bfloat16 for a precision")
    if config.model.lora_rank and mesh["tp"] > 1:
        raise ValueError(f"--lora_rank={config.model.lora_rank}: not with tp in --mesh; shard with fsdp alone")
    return mesh
