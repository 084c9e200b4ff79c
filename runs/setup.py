"""
From settings to a run, or to one line that says which setting to change.

The order is that of cost: what can be refused without reading anything is refused in config.py, then reward functions are
imported, data read, the tokenizer loaded and the prompts measured; the model comes last, and the start-up check after it.
"""

import math
import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from config import Config
from data import encode_prompt, load_examples, prompt_key, with_instruction
from engine.devices import best_device, keep_freed_memory, num_processes
from engine.sharding import gathered_weights, shard, sharded_like
from environments.conversations import EnvironmentRaised
from environments.loading import load_environment, refuse_missing_columns
from model import (
    AdapterReference, copy_into, has_adapter, layers_of, load_policy, load_tokenizer, merged_copy, move,
    recompute_activations, refuse_too_long, save_policy,
)
from reward_functions.calling import RewardError
from reward_functions.loading import missing_columns, name_of
from rewards import load_reward_function
from runs.checkpoint import latest_checkpoint, restore_counters
from runs.folder import RunFolder
from runs.memory_estimate import describe_step
from runs.phases import adam_8bit, plan
from runs.run import Run
from runs.startup_check import check_setup
from sources.readers import READERS, View


def load_reward_functions(config: Config) -> list[Callable]:
    """The reward functions of a GRPO run, in order; none for a supervised one."""
    if not config.training.use_grpo:
        return []
    functions = [load_reward_function(name) for name in config.grpo.reward_functions]
    names = [name_of(function) for function in functions]
    if len(set(names)) < len(names):
        raise ValueError(f"--reward_functions {' '.join(config.grpo.reward_functions)}: two have the same name; rename one")
    return functions


def load_data(config: Config) -> tuple[Sequence[dict], list[dict]]:
    """(training examples, held-out examples). A prompt that is held out is not trained on, should it be in both; nor is one
    that differs from it in white space or case alone.
    """
    data = config.data
    options = dict(seed=config.training.seed, bad_lines=data.bad_lines, columns=data.columns)
    train = load_examples(data.dataset, "train", limit=data.limit or None, **options)
    chosen = range(len(train))
    if data.eval_limit == 0:
        held_out = []
    elif data.eval_dataset:
        held_out = load_examples(data.eval_dataset, "test", limit=data.eval_limit, **options)
    elif Path(data.dataset).suffix in READERS:                                   # one file: set some of it aside
        order = random.Random(config.training.seed).sample(chosen, len(train))
        count = min(data.eval_limit, len(train) // 5)
        chosen, held_out = order[count:], [train[i] for i in order[:count]]
    else:
        held_out = load_examples(data.dataset, "test", limit=data.eval_limit, **options)
    held_out_prompts = {prompt_key(example["prompt"]) for example in held_out}
    overlap = {i for i, example in enumerate(train) if prompt_key(example["prompt"]) in held_out_prompts}
    chosen = array("q", (i for i in chosen if i not in overlap))
    if not chosen:
        raise ValueError(f"--dataset={data.dataset}: all its prompts are held out; choose another --eval_dataset")
    instruct = partial(with_instruction, instruction=data.instruction)
    return View(train, chosen, instruct), [instruct(example) for example in held_out]


def fit_prompts(examples: Sequence[dict], tokenizer, config: Config, say: Callable) -> tuple[Sequence[dict], int]:
    """Deal with prompts longer than --max_prompt_length as --long_prompts says, and say how many there were.

    returns  the examples, and how many tokens the longest of their prompts has
    """
    data, limit = config.data, config.data.max_prompt_length
    lengths = array("q", (len(encode_prompt(tokenizer, example["prompt"])) for example in examples))
    too_long = [i for i, length in enumerate(lengths) if length > limit]
    if not too_long:
        return examples, max(lengths, default=0)
    if data.long_prompts == "error":
        raise ValueError(
            f"--max_prompt_length={limit}: {len(too_long)} of {len(examples)} prompts are longer, such as "
            f"{examples[too_long[0]]['prompt']!r:.40} with {lengths[too_long[0]]} tokens; raise it to {max(lengths)}, or pass "
            "--long_prompts truncate or drop"
        )
    say(f"{len(too_long)} of {len(examples)} prompts have more than {limit} tokens: {data.long_prompts}")
    if data.long_prompts == "truncate":
        return View(examples, range(len(examples)), partial(truncated, tokenizer=tokenizer, limit=limit)), limit
    kept = array("q", (i for i, length in enumerate(lengths) if length <= limit))
    if not kept:
        raise ValueError(f"--max_prompt_length={limit} --long_prompts drop: no prompt is left")
    return View(examples, kept, dict), max(lengths[i] for i in kept)


def truncated(example: dict, tokenizer, limit: int) -> dict:
    """The example, a prompt of more than limit tokens replaced by the ids of its BOS, if it has one, and its end."""
    ids = encode_prompt(tokenizer, example["prompt"])
    if len(ids) <= limit:
        return example
    begin = ids[:1] if ids[0] == tokenizer.bos_token_id else []
    return example | {"prompt": begin + ids[len(ids) - limit + len(begin) :]}


def validate_demonstrations(config: Config, dataset: Sequence[dict]) -> None:
    """Supervised steps need something to imitate."""
    training = config.training
    without = sum(not e.get("completion") for e in dataset) if training.cold_start_steps or not training.use_grpo else 0
    if without:
        wish = f"--cold_start_steps={training.cold_start_steps}" if training.use_grpo else "supervised training (no --use_grpo)"
        instead = "--cold_start_steps 0" if training.use_grpo else "--use_grpo --cold_start_steps 0"
        raise ValueError(
            f"{wish} needs demonstrations, but {config.data.dataset} has no completion for {without} of {len(dataset)} "
            f"examples; name a --completion_column, or pass {instead} to learn from rewards alone"
        )


def validate_grpo_setup(config: Config, tokenizer, dataset: Sequence[dict]) -> None:
    """Refuse a GRPO run that cannot work: one line, ValueError. dataset: examples, each with at least a prompt."""
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


def start_up_check(model, tokenizer, examples: list[dict], config: Config, functions: list, environment, say: Callable) -> bool:
    """Run the check of runs/startup_check.py; print what is worth knowing, all of it with --check. Refuse if a promise is broken.

    returns  whether siblings can be packed behind one prompt
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
            say(f"  {mark:<6} {finding.name:<12} {finding.found}")
    broken = [finding for finding in findings if finding.ok is False]
    if broken:
        raise ValueError(f"start-up check: {broken[0].name}: {broken[0].found}; {broken[0].fix}")
    packing = next(finding for finding in findings if finding.name == "packing")
    agreements = ", ".join(f"{f.name} ok" for f in findings if f.ok)
    say(f"start-up check: {agreements}")
    return bool(packing.ok)


def set_up(config: Config) -> Run:
    """Everything that comes before the first step. Raises ValueError, one line, for what the user has to change."""
    device = best_device()
    keep_freed_memory()
    if device.type == "xla" and config.model.precision == "float16":
        raise ValueError("--precision=float16: on XLA its loss would not be scaled; take bfloat16")
    if config.training.adam_8bit:
        adam_8bit()
    mesh = mesh_of(config)
    if not config.training.max_tokens_per_forward:        # written down, so a resumed run has the same
        tokens = 2048 if device.type == "cpu" else 8192
        config = replace(config, training=replace(config.training, max_tokens_per_forward=tokens))
    folder = RunFolder(config)
    functions, environment = load_reward_functions(config), load_environment(config.grpo.environment)
    train_set, eval_set = load_data(config)
    validate_demonstrations(config, train_set)
    checkpoint = latest_checkpoint(folder.path, folder.say) if config.training.resume else None
    if config.training.resume and not checkpoint and (folder.path / "final").exists():
        raise ValueError(f"--resume: {folder.path} is complete and its checkpoints are gone; take its final as --model_path")
    if config.training.resume:
        folder.say(f"resuming {folder.path} from {checkpoint or 'its beginning: there is no checkpoint yet'}")
    if checkpoint:
        compare_settings(config, checkpoint, folder.say)
    model_config = replace(config.model, model_path=str(checkpoint)) if checkpoint else config.model
    tokenizer = load_tokenizer(model_config)
    tokenizer.tools = getattr(environment, "tools", None)                        # for its chat template, in encode.render
    if config.training.use_grpo:
        validate_grpo_setup(config, tokenizer, train_set)
    train_set, longest = fit_prompts(train_set, tokenizer, config, folder.say)
    eval_set, longest_held_out = fit_prompts(eval_set, tokenizer, config, folder.say)

    torch.manual_seed(config.training.seed)
    model, _ = load_policy(model_config)
    run = Run(
        config, folder, device, move(model, device), tokenizer, functions, train_set, eval_set, plan(config, len(train_set)),
        longest_prompt=longest, kl_coef=config.grpo.kl_coef, environment=environment,
    )
    if config.training.gradient_checkpointing:
        recompute_activations(model)
    shard(model, layers_of(model), mesh)
    refuse_too_long(model, max(longest, longest_held_out), config.grpo.generation_max_length)
    folder.describe(model, device, run.phases, len(train_set), len(eval_set))
    run.shared_prompt = start_up_check(model, tokenizer, train_set, config, functions, environment, folder.say)
    if config.training.use_grpo:
        for line in describe_step(run):
            folder.say(line)
    if checkpoint:
        restore_counters(run, checkpoint)
        if not config.grpo.kl_target:
            run.kl_coef = config.grpo.kl_coef             # a flag may have changed it
        run.reference = load_reference(run, checkpoint, run.saved_state)
    return run


def keep_base(run: Run) -> None:
    """Write down what an adapter of the built-in model belongs to: no hub has those weights."""
    if has_adapter(run.model) and not run.config.model.model_path:
        base = run.folder.path.resolve() / "base"
        run.model.peft_config["default"].base_model_name_or_path = str(base)
        if run.step == 0:
            save_policy(merged_copy(run.model), run.tokenizer, base)             # a new adapter adds 0


def compare_settings(config: Config, checkpoint: Path, say: Callable) -> None:
    """Say what a resumed run does differently from now on, and refuse what the saved state does not fit."""
    state = torch.load(checkpoint / "state.pt", weights_only=True, map_location="cpu", mmap=True)
    saved, now = ({name: value for part in settings.values() for name, value in part.items()}
                  for settings in (state["settings"], config.as_dict()))
    for settings in saved, now:
        settings["use_kl_penalty"] = settings["use_kl_penalty"] and settings["kl_penalty_coef"] > 0
    changed = [name for name in now if name != "output_dir" and now[name] != saved.get(name, now[name])]
    fixed = ["use_grpo", "model_path", "lora_rank", "lora_alpha", "profile", "cold_start_steps"]
    if "optimizer" in state:                              # saved within a phase
        fixed += ["adam_8bit"]
        in_grpo = saved["use_grpo"] and state["phase"] == (saved["cold_start_steps"] > 0)
        fixed += ["use_value_head", "use_kl_penalty"] * in_grpo
    for name in fixed:
        if name in changed:
            raise ValueError(
                f"--{name}={now[name]}: this run began with {saved[name]!r}; start a new one instead, from a checkpoint as "
                "--model_path"
            )
    if changed:
        say("  note   changed: " + ", ".join(f"{name} {saved[name]} -> {now[name]}" for name in changed))


def load_reference(run: Run, checkpoint: Path, state: dict):
    """The reference of a checkpoint and its state, where there is one and the KL penalty asks for it."""
    config, adapter = run.config, state.get("reference_adapter")
    if config.grpo.kl_coef and adapter:
        reference = AdapterReference(run.model)
        copy_into(reference.kept, [sharded_like(whole, kept) for whole, kept in zip(adapter, reference.kept, strict=True)])
        return reference
    if not config.grpo.kl_coef or not (checkpoint / "reference").exists():
        return None
    reference, _ = load_policy(replace(config.model, model_path=str(checkpoint / "reference")))
    reference = move(reference, torch.device("cpu") if config.grpo.reference_offload else run.device).eval()
    shard(reference, layers_of(reference), getattr(run.model, "mesh", {}))
    return reference.requires_grad_(False)


def mesh_of(config: Config) -> dict[str, int]:
    """How the processes share the weights, for devices.shard: over all of them, or as --mesh says."""
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
