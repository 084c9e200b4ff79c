"""
From settings to a run, or to one line that says which setting to change.

The order is that of cost: what can be refused without reading anything is refused in config.py, then reward functions are
imported, data read, the tokenizer loaded and the prompts measured; the model comes last, and the start-up check after it.
"""

import inspect
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from check import check_setup
from checkpoint import latest_checkpoint, restore_counters, restore_phase
from config import Config
from contract import contract
from data import READERS, ShuffledBatches, encode_prompt, load_examples, with_instruction
from devices import best_device, keep_freed_memory
from model import ValueHead, frozen_copy, load_policy, load_tokenizer, move, recompute_activations
from rewards import RESERVED, RewardError, load_reward_function, name_of
from runs import RunFolder


@dataclass
class Phase:
    """A stretch of training with one kind of step, an optimiser and a schedule of its own."""

    name: str                   # cold_start, supervised or grpo
    steps: int                  # optimiser steps
    learning_rate: float


@dataclass
class Run:
    """Everything that a run is. What changes during it: the model, and the fields from `phase` on."""

    config: Config
    folder: RunFolder
    device: torch.device
    model: torch.nn.Module
    tokenizer: object
    reward_functions: list
    train_set: list
    eval_set: list
    phases: list[Phase]
    shared_prompt: bool = True                            # pack siblings behind one prompt; the start-up check decides
    phase: int = 0                                        # index into phases
    phase_step: int = 0                                   # optimiser steps taken in this phase
    step: int = 0                                         # optimiser steps taken in all
    skipped: int = 0                                      # of those, how many were not finite and changed nothing
    skipped_in_a_row: int = 0                             # how many of the last ones
    kl_coef: float = 0.0                                  # points per nat; constant unless kl_target is set
    reward_sum: float = 0.0                               # points, over all completions learned from in this run
    reward_count: int = 0                                 # how many those were
    saved_state: dict = field(default_factory=dict)       # of the checkpoint to go on from
    batches: ShuffledBatches | None = None
    optimizer: torch.optim.Optimizer | None = None
    scheduler: object = None
    reference: torch.nn.Module | None = None              # frozen; None where nothing asks for it
    value_head: torch.nn.Module | None = None             # likewise


def load_reward_functions(config: Config) -> list[Callable]:
    """The reward functions of a GRPO run, in order; none for a supervised one."""
    if not config.training.use_grpo:
        return []
    functions = [load_reward_function(name) for name in config.grpo.reward_functions]
    names = [name_of(function) for function in functions]
    if len(set(names)) < len(names):
        raise ValueError(f"--reward_functions {' '.join(config.grpo.reward_functions)}: two have the same name; rename one")
    return functions


def load_data(config: Config) -> tuple[list[dict], list[dict]]:
    """(training examples, held-out examples). A prompt that is held out is not trained on, should it be in both."""
    data = config.data
    options = dict(seed=config.training.seed, bad_lines=data.bad_lines)
    train = load_examples(data.dataset, "train", limit=data.limit or None, **options)
    if data.eval_limit == 0:
        held_out = []
    elif data.eval_dataset:
        held_out = load_examples(data.eval_dataset, "test", limit=data.eval_limit, **options)
    elif Path(data.dataset).suffix in READERS:                                   # one file: set some of it aside
        order = random.Random(config.training.seed).sample(train, len(train))
        count = min(data.eval_limit, len(train) // 5)
        train, held_out = order[count:], order[:count]
    else:
        held_out = load_examples(data.dataset, "test", limit=data.eval_limit, **options)
    held_out_prompts = {str(example["prompt"]) for example in held_out}
    train = [example for example in train if str(example["prompt"]) not in held_out_prompts]
    if not train:
        raise ValueError(f"--dataset={data.dataset}: all its prompts are held out; choose another --eval_dataset")
    return [with_instruction(e, data.instruction) for e in train], [with_instruction(e, data.instruction) for e in held_out]


def fit_prompts(examples: list[dict], tokenizer, config: Config, say: Callable) -> list[dict]:
    """Deal with prompts longer than --max_prompt_length as --long_prompts says, and say how many there were.

    A truncated prompt is kept as token ids, without its beginning.
    """
    data = config.data
    lengths = [len(encode_prompt(tokenizer, example["prompt"])) for example in examples]
    too_long = [i for i, length in enumerate(lengths) if length > data.max_prompt_length]
    if not too_long:
        return examples
    if data.long_prompts == "error":
        raise ValueError(
            f"--max_prompt_length={data.max_prompt_length}: {len(too_long)} of {len(examples)} prompts are longer, such as "
            f"{examples[too_long[0]]['prompt']!r:.40} with {lengths[too_long[0]]} tokens; raise it to {max(lengths)}, or pass "
            "--long_prompts truncate or drop"
        )
    say(f"{len(too_long)} of {len(examples)} prompts have more than {data.max_prompt_length} tokens: {data.long_prompts}")
    if data.long_prompts == "drop":
        kept = [example for example, length in zip(examples, lengths, strict=True) if length <= data.max_prompt_length]
        if not kept:
            raise ValueError(f"--max_prompt_length={data.max_prompt_length} --long_prompts drop: no prompt is left")
        return kept
    shortened = list(examples)
    for i in too_long:
        ids = encode_prompt(tokenizer, examples[i]["prompt"])[-data.max_prompt_length :]
        shortened[i] = examples[i] | {"prompt": ids}
    return shortened


def validate_demonstrations(config: Config, dataset: list[dict]) -> None:
    """Supervised steps need something to imitate."""
    training = config.training
    if (training.cold_start_steps or not training.use_grpo) and not all(e.get("completion") for e in dataset):
        wish = f"--cold_start_steps={training.cold_start_steps}" if training.use_grpo else "supervised training (no --use_grpo)"
        raise ValueError(f"{wish} needs demonstrations, but {config.data.dataset} has no completion column for some examples")


def validate_grpo_setup(config: Config, tokenizer, dataset: list[dict]) -> None:
    """Refuse a GRPO run that cannot work: one line, ValueError. dataset: examples, each with at least a prompt."""
    size = config.grpo.num_completions_per_prompt
    if size < 2:
        raise ValueError(f"--num_completions_per_prompt={size}: GRPO compares siblings, so it needs at least 2")
    if tokenizer is None or tokenizer.pad_token_id is None or tokenizer.eos_token_id is None:
        raise ValueError("GRPO needs a tokenizer with pad_token and eos_token, to batch completions and to end them")
    if not dataset or not all("prompt" in example for example in dataset):
        raise ValueError(f"--dataset={config.data.dataset}: every example needs a prompt")
    columns = {name for example in dataset for name in example} - set(RESERVED) | {"completions", "prompts", "completion_ids"}
    for name in config.grpo.reward_functions:
        parameters = inspect.signature(load_reward_function(name)).parameters.values()
        needed = [p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        missing = [column for column in needed if column not in columns]
        if missing:
            raise ValueError(
                f"--reward_functions {name}: needs the column {missing[0]}, which {config.data.dataset} does not have "
                f"(columns: {', '.join(sorted(set().union(*dataset)))})"
            )


def check_positions(config: Config, model, tokenizer, examples: list[dict]) -> None:
    """Refuse completions that would outgrow the positions that the model knows."""
    known = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = max(len(encode_prompt(tokenizer, example["prompt"])) for example in examples)
    wanted = config.grpo.generation_max_length
    if known and longest + wanted > known:
        raise ValueError(
            f"--generation_max_length={wanted}: with prompts of up to {longest} tokens that exceeds the model's {known} "
            f"positions; at most {known - longest}, or shorten prompts with --max_prompt_length"
        )


def start_up_check(model, tokenizer, examples: list[dict], config: Config, functions: list, say: Callable) -> bool:
    """Run the check of check.py; print what is worth knowing, all of it with --check. Refuse if a promise is broken.

    returns  whether siblings can be packed behind one prompt
    """
    try:
        findings = check_setup(model, tokenizer, examples, config.grpo, functions)
    except RewardError as error:
        raise ValueError(f"--reward_functions {' '.join(config.grpo.reward_functions)}: {error}") from error
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
    if device.type != "cuda" and config.model.attn_implementation == "flex_attention":
        raise ValueError("--attn_implementation=flex_attention: torch has a backward pass of it on a GPU alone; take sdpa")
    folder = RunFolder(config)
    functions = load_reward_functions(config)
    train_set, eval_set = load_data(config)
    validate_demonstrations(config, train_set)
    checkpoint = latest_checkpoint(folder.path) if config.training.resume else None
    model_config = replace(config.model, model_path=str(checkpoint)) if checkpoint else config.model
    tokenizer = load_tokenizer(model_config)
    if config.training.use_grpo:
        validate_grpo_setup(config, tokenizer, train_set)
    train_set, eval_set = (fit_prompts(part, tokenizer, config, folder.say) for part in (train_set, eval_set))

    torch.manual_seed(config.training.seed)
    model, tokenizer = load_policy(model_config)
    run = Run(
        config, folder, device, move(model, device), tokenizer, functions, train_set, eval_set, plan(config, len(train_set)),
        kl_coef=config.grpo.kl_coef,
    )
    if config.training.gradient_checkpointing:
        recompute_activations(model)
    check_positions(config, model, tokenizer, train_set + eval_set)
    folder.describe(model, device, run.phases, len(train_set), len(eval_set))
    run.shared_prompt = start_up_check(model, tokenizer, train_set, config, functions, folder.say)
    if config.training.use_grpo:
        for line in contract(run):
            folder.say(line)
    if checkpoint:
        restore_counters(run, checkpoint)
        refuse_changes(run)
        if not config.grpo.kl_target:
            run.kl_coef = config.grpo.kl_coef             # a flag may have changed it
        run.reference = load_reference(config, checkpoint, device)
    return run


def refuse_changes(run: Run) -> None:
    """What a GRPO phase began with or without cannot come or go when it is resumed: the rest of the state would not fit."""
    saved, grpo = run.saved_state["settings"]["grpo"], run.config.grpo
    if "optimizer" not in run.saved_state or run.phases[run.phase].name != "grpo":
        return
    had_kl = saved["use_kl_penalty"] and saved["kl_penalty_coef"] > 0
    for name, before, after in (
        ("use_value_head", saved["use_value_head"], grpo.use_value_head), ("use_kl_penalty", had_kl, grpo.kl_coef > 0),
    ):
        if before != after:
            raise ValueError(
                f"--{name}={after}: this phase began with {before}; start a new run instead, from a checkpoint as --model_path"
            )


def load_reference(config: Config, checkpoint: Path, device: torch.device) -> torch.nn.Module | None:
    """The reference beside a checkpoint, where there is one and the KL penalty asks for it."""
    if not config.grpo.kl_coef or not (checkpoint / "reference").exists():
        return None
    reference, _ = load_policy(replace(config.model, model_path=str(checkpoint / "reference")))
    return move(reference, torch.device("cpu") if config.grpo.reference_offload else device).eval().requires_grad_(False)


def plan(config: Config, num_examples: int) -> list[Phase]:
    """The phases of a run and their lengths in optimiser steps."""
    training = config.training
    limit, rollouts = training.max_steps or math.inf, math.ceil(training.num_epochs * num_examples / training.batch_size)
    if not training.use_grpo:
        return [Phase("supervised", int(min(limit, rollouts)), training.learning_rate)]
    cold = int(min(limit, training.cold_start_steps))
    grpo = Phase("grpo", int(min(limit, rollouts * config.updates_per_rollout)), training.learning_rate)
    return [Phase("cold_start", cold, training.cold_start_learning_rate), grpo] if cold else [grpo]


def begin_phase(run: Run, phase: Phase) -> None:
    """A new optimiser, schedule and data order and, where they are asked for, reference and value head; or the saved ones."""
    training, grpo = run.config.training, run.config.grpo
    run.batches = ShuffledBatches(run.train_set, training.batch_size, training.seed + run.phase)
    parameters = list(run.model.parameters())
    if phase.name == "grpo" and grpo.kl_coef > 0 and run.reference is None:
        run.reference = frozen_copy(run.model)
        move(run.reference, torch.device("cpu") if grpo.reference_offload else run.device)
    if phase.name == "grpo" and grpo.use_value_head:
        run.value_head = ValueHead(run.model.config.get_text_config().hidden_size).to(run.device)
        parameters += run.value_head.parameters()
    run.optimizer = torch.optim.AdamW(
        parameters, lr=phase.learning_rate, betas=(0.9, training.adam_beta2), weight_decay=training.weight_decay,
        fused=run.device.type != "xla",                   # XLA fuses by itself
    )
    warmup = math.ceil(training.warmup_ratio * phase.steps)
    factor = partial(learning_rate_factor, steps=phase.steps, warmup=warmup, schedule=training.lr_schedule)
    run.scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, factor)
    if not restore_phase(run) and phase.name == "grpo":
        run.folder.say("the loss stays near 0 by construction (siblings' advantages cancel): watch reward and entropy")


def learning_rate_factor(step: int, *, steps: int, warmup: int, schedule: str) -> float:
    """Share of the peak learning rate at a step, counted from 0. It is never 0: no step is for nothing."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}[schedule]
