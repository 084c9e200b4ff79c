"""
Set up a run from its settings, or raise ValueError with one line that names the setting to change.

Cheap checks come first. config.py has rejected incompatible flags; then reward functions are imported, data
is read, the tokenizer loaded, and prompts are counted in tokens. The model and its start-up check come last.
"""

import inspect
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from config import Config, ModelConfig, TrainingConfig, reject, validate_functions
from engine.devices import (
    all_gather_object, best_device, keep_freed_memory, num_processes, seed_generators,
)
from engine.errors import RunError
from engine.device_policy import DevicePolicy, runs_in_core
from engine.fingerprints import fingerprint_of_examples
from engine.models import (
    check_context_length, load_any_policy, load_any_tokenizer, move, moved_to, recompute_activations,
    resolve_precision, save_any_policy,
)
from engine.sharding import shard
from guards import dated_template
from model import load_policy
from policy import Policy
from reward_functions.calling import parameters_of
from reward_functions.loading import as_name, load_reward_functions, require_columns
from runs.checkpoint import latest_checkpoint, read_state
from runs.folder import RunFolder
from runs.phases import plan_phases
from runs.run import Run
from runs.startup_check import choose_engine, refuse_wrong_head, refuse_wrong_sampler
from sample import stop_token_ids
from sources.readers import SUFFIXES
from sources.training_data import (
    fit_prompts, leave_out_rejected, load_data, note_unused, refuse_long_demonstrations,
    validate_demonstrations,
)


def name_objects(config: Config, given: dict) -> Config:
    """Return the configuration with the names of the objects that were passed to set_up.

    given   reward_functions, environment, dataset, eval_dataset, reference_path: names, objects or None
    raises  ValueError if one is not a function, or if a resumed run lacks an object that it began with
    """
    for f in [*(given["reward_functions"] or []), given["environment"] or ""]:
        if not (isinstance(f, str) or callable(f)):
            raise ValueError(f"{f!r:.60} is neither a function nor the name of one")
    names = {name: as_name(value) for name, value in given.items() if value is not None}
    if given["reward_functions"] is not None:
        names["reward_functions"] = list(map(as_name, given["reward_functions"]))
    config = Config.of(**config.flags | names)
    for name, value in config.flags.items():
        if name in given and name not in names and "python:" in str(value):
            raise ValueError(f"--{name} {value}: a Python object; pass it to train() again")
    validate_functions(config.grpo)
    return config


def config_on_device(config: Config, device: torch.device) -> Config:
    """Return the configuration with this device's precision. Raises ValueError if it is not supported."""
    if config.grpo.engine == "vllm":
        from engine.vllm_engine import refuse_engine  # imported for vLLM only

        refuse_engine(device)
    precision = resolve_precision(config.model.precision, device)                # as in config.json
    if device.type == "xla" and precision == "float16":
        raise ValueError("--precision=float16: on XLA the loss would not be scaled; use bfloat16")
    path, reference = map(absolute, (config.model.model_path, config.grpo.reference_path))
    return replace(
        config, model=replace(config.model, precision=precision, model_path=path),
        grpo=replace(config.grpo, reference_path=reference))


def absolute(path: str) -> str:
    """Return the absolute path of a folder, with which a run is resumed from anywhere; a hub id as it is."""
    return os.path.abspath(path) if path and os.path.isdir(path) else path


def validate_grpo_setup(
    config: Config, tokenizer, dataset: Sequence[dict], *, reward_functions: Sequence | None = None,
    environment: str | Callable | None = None,
) -> None:
    """Raise ValueError if GRPO cannot work with these settings, this tokenizer or these examples.

    reward_functions, environment  names or functions; None: those of config
    """
    if tokenizer is None or tokenizer.pad_token_id is None or tokenizer.eos_token_id is None:
        raise ValueError("GRPO needs a tokenizer with pad_token and eos_token")
    if not dataset or not all("prompt" in example for example in dataset):
        raise ValueError(f"--dataset={config.data.dataset}: every example needs a prompt")
    names = config.grpo.reward_functions if reward_functions is None else reward_functions
    require_columns(load_reward_functions(names), dataset, config.data.dataset)
    if environment := environment or config.grpo.environment:
        from environments.instances import load_environment, refuse_missing_columns  # only if there is one

        refuse_missing_columns(config.grpo.environment, load_environment(environment), dataset)


def start_up_check(
    model, tokenizer, examples: list[dict], config: Config, make_policy: Callable | None, reference,
    longest_prompt: int, notify: Callable,
) -> Policy:
    """Return the policy of a run. Raises ValueError if its sampling or forward pass would be wrong."""
    max_tokens, grpo = config.training.max_tokens_per_forward, config.grpo
    prompts = [example["prompt"] for example in examples[:2]]
    plain = DevicePolicy(model, tokenizer, max_tokens=max_tokens)
    with plain.sampling():
        policy, note = choose_engine(plain, prompts, grpo, longest_prompt)
        rollout = refuse_wrong_sampler(policy, prompts, grpo.generation_max_length)
        if reference is not None:
            rows = plain.like(reference)
            with moved_to(reference, plain.device), rows.sampling():
                refuse_wrong_head(rows, rollout, "teacher")
                if policy.shares_prompts:
                    other, note = choose_engine(rows, prompts, grpo, longest_prompt)
                    policy = policy if other.shares_prompts else plain
    if note:
        notify(f"  note   {note}")
    configured = stop_token_ids(model, tokenizer, with_template=False)
    for token in {*stop_token_ids(model, tokenizer)} - {*configured}:
        name = tokenizer.convert_ids_to_tokens(token)
        notify(f"  note   {name}, which ends a turn in the chat template, also ends completions")
    if make_policy:
        policy = make_policy(model, tokenizer, max_tokens=max_tokens)
        if not isinstance(policy, Policy):
            raise ValueError(f"engine: {type(policy).__name__} is no Policy; see CONTRIBUTING.md, A sampler")
        needs_more = num_processes() > 1 or config.model.precision == "float16"
        if needs_more and not isinstance(policy, DevicePolicy):
            raise ValueError(
                f"engine: {type(policy).__name__} supports neither several processes nor float16; derive "
                "it from DevicePolicy of engine/device_policy.py")
    elif grpo.engine == "vllm":
        from engine.vllm_engine import VLLM

        length = longest_prompt + grpo.generation_max_length
        policy.sampler = VLLM(policy, max_length=length, memory=grpo.engine_memory)
    elif policy is plain and runs_in_core(model):
        policy = Policy(model, tokenizer, max_tokens=max_tokens)
    return policy


def set_up(
    config: Config, *, reward_functions: Sequence[str | Callable] | None = None,
    environment: str | Callable | None = None, dataset: str | Sequence | None = None,
    eval_dataset: str | Sequence | None = None, engine: Callable | None = None,
    optimizer: Callable | None = None, reference: torch.nn.Module | None = None,
) -> Run:
    """Prepare a run up to its first step. Raises ValueError if a setting has to be changed.

    reward_functions, environment  names, functions, a class of environments, or None: those of config
    dataset, eval_dataset          a source or examples for load_examples, or None: that of config
    engine                         a subclass of Policy, or a function of its arguments that returns one;
                                   None: --engine
    optimizer                      a function of named parameters, [(name, parameter), ...], that returns a
                                   torch.optim.Optimizer, called at the start of every phase. Its own learning
                                   rates are the peaks of the schedule; None: AdamW
    reference                      another model with the same tokenizer, such as a teacher, for the KL
                                   penalty; None: a copy of the policy
    """
    device = best_device(config.model.device)
    if reward_functions is not None:
        alone = isinstance(reward_functions, str) or callable(reward_functions)
        reward_functions = [reward_functions] if alone else list(reward_functions)
    config = config_on_device(name_objects(config, dict(
        reward_functions=reward_functions, environment=environment, dataset=dataset,
        eval_dataset=eval_dataset, reference_path=reference,
    )), device)
    training = config.training
    seed_generators(training.seed)
    mesh = parse_mesh(config)
    folder = RunFolder(config)
    console = folder.console
    names = config.grpo.reward_functions if reward_functions is None else reward_functions
    functions = load_reward_functions(names) if training.use_grpo else []
    environment = environment or config.grpo.environment or None
    tools = None
    if environment:
        from environments.instances import load_environment, tools_of  # only with an environment

        environment = load_environment(environment)
        tools = tools_of(environment)
    train_set, eval_set = load_data(config, dataset, eval_dataset)
    sets = {"dataset": train_set, "eval_dataset": eval_set}
    fingerprints = {name: fingerprint_of_examples(examples) for name, examples in sets.items()}
    if training.keep_best and not eval_set:
        raise ValueError("--keep_best: needs held-out problems: an --eval_limit above 0, or a larger file")
    validate_demonstrations(config, train_set)
    checkpoint = find_checkpoint(config, folder, fingerprints) if training.resume else None
    model_config = replace(config.model, model_path=str(checkpoint)) if checkpoint else config.model
    tokenizer = load_any_tokenizer(model_config)
    has_teacher = training.use_grpo and config.grpo.reference_path
    if has_teacher and reference is None:
        from engine.reference import compare_tokenizers   # here and below: only if needed

        compare_tokenizers(tokenizer, config)
    if training.use_grpo and names == ["none"] and not has_teacher:
        raise ValueError("--reward_functions=none: needs a teacher; add --reference_path")
    if "strftime_now" in str(tokenizer.chat_template):    # the same prompts when the run is resumed
        config = replace(config, model=replace(config.model, chat_template_date=str(tokenizer.today.date())))
        if "strftime_now(" in dated_template(tokenizer, tools):
            console.print("  note   the chat template computes a date; prompts of a resumed run may differ")
    tokenizer.tools = tools                               # for the chat template
    if training.use_grpo:
        validate_grpo_setup(
            config, tokenizer, train_set, reward_functions=functions, environment=environment)
    named = parameters_of([*functions, getattr(environment, "reset", environment)])
    train_set = leave_out_rejected(train_set, named, console.print)
    note_unused(train_set, named, tokenizer, console.print)
    train_set, longest_prompt = fit_prompts(train_set, tokenizer, config, console.print)
    eval_set, longest_held_out = fit_prompts(eval_set, tokenizer, config, console.print)
    if not training.max_tokens_per_forward:
        max_tokens = max(2048 if device.type == "cpu" else 8192, 2 * longest_prompt)
        config = replace(config, training=replace(training, max_tokens_per_forward=max_tokens))
    folder.config = console.config = config
    training = config.training
    refuse_other_settings(config, fingerprints)

    torch.manual_seed(training.seed)                      # for weights that are in no file
    if config.model.lora_rank and not model_config.model_path and not training.check:
        model_config = write_base(model_config, folder)
    model = load_trained_model(model_config, training, device, mesh)
    longest = max(longest_prompt, longest_held_out)
    check_context_length(model, longest, config.grpo.generation_max_length)
    if inspect.isclass(environment):                      # its reset may lengthen a prompt
        longest = max(longest, config.data.max_prompt_length)
    phases = plan_phases(config, len(train_set))
    console.describe(model, device, len(train_set), len(eval_set), phases)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    refuse_long_demonstrations(config, train_set, tokenizer, stop_token_ids(model, tokenizer), positions)
    if has_teacher or reference is not None:
        from engine.reference import prepare_teacher

        reference = prepare_teacher(reference, model, tokenizer, config)
    policy = start_up_check(
        model, tokenizer, train_set, config, engine, reference, longest, console.print)
    run = Run(
        config, folder, functions, environment, train_set, eval_set, fingerprints, phases, policy,
        make_optimizer=optimizer, teacher=reference)
    if checkpoint:
        from engine.reference import load_reference

        run.restore(checkpoint)
        if saved := load_reference(model, config, checkpoint, run.saved_state):
            run.reference = policy.like(saved)
    return run


def refuse_other_settings(config: Config, fingerprints: dict[str, str]) -> None:
    """Raise RunError, on all ranks, if their settings or examples differ."""
    settings = config.flags
    for name in "output_dir", "model_path", "dataset", "eval_dataset", "reward_functions", "environment":
        del settings[name]                                # paths may differ between machines
    settings |= fingerprints
    first, *others = all_gather_object(settings)
    for rank, its_settings in enumerate(others, start=1):
        for name, value in its_settings.items():
            if value != first[name]:
                raise RunError(
                    f"{name} is {first[name]!s:.60} on rank 0 and {value!s:.60} on rank {rank}: start all "
                    "ranks with the same command, files and versions.")


def load_trained_model(
    model_config: ModelConfig, training: TrainingConfig, device: torch.device, mesh: dict[str, int]
) -> torch.nn.Module:
    """Load the model that is trained, and shard it over the device mesh."""
    model, _ = load_any_policy(model_config)
    move(model, device)
    if training.gradient_checkpointing:
        recompute_activations(model)
    shard(model, mesh)
    keep_freed_memory()                                   # after loading, which frees whole weights
    return model


def write_base(config: ModelConfig, folder: RunFolder) -> ModelConfig:
    """Write the built-in model to base/ in the run folder, for an adapter. Return settings that load it."""
    folder.ranks.gather(folder.acquire_lock)
    policy, tokenizer = load_policy(replace(config, lora_rank=0, precision="float32"))
    path = folder.path.resolve() / "base"
    folder.ranks.gather(partial(save_any_policy, policy, tokenizer, path))
    return replace(config, model_path=str(path))


def find_checkpoint(config: Config, folder: RunFolder, fingerprints: dict[str, str]) -> Path | None:
    """Return the checkpoint to resume from, if there is one. Raises ValueError if it does not fit."""
    checkpoint = folder.ranks.gather(partial(latest_checkpoint, folder.path))[0]
    if not checkpoint and (folder.path / "final").exists():
        raise ValueError(
            f"--resume: {folder.path} is complete and its checkpoints are gone; pass final as --model_path")
    console = folder.console
    console.print(f"resuming {folder.path} from {checkpoint or 'its beginning: there is no checkpoint yet'}")
    if checkpoint:
        compare_settings(config, checkpoint, console.print, fingerprints)
    return checkpoint


def compare_settings(config: Config, checkpoint: Path, notify: Callable, fingerprints: dict) -> None:
    """Print the changed settings of a resumed run. Raises ValueError if state or data do not fit."""
    state, now = read_state(checkpoint, mmap=True), config.flags
    saved = {name: value for section in state["settings"].values() for name, value in section.items()}
    begun = state.get("fingerprints", {})                 # none in a checkpoint of an earlier version
    others = {name: found for name, found in fingerprints.items() if begun.get(name, found) != found}
    for settings in saved, now:
        settings["use_kl_penalty"] = settings["use_kl_penalty"] and settings["kl_penalty_coef"] > 0
    changed = [name for name in now if name != "output_dir" and now[name] != saved.get(name, now[name])]
    fixed = [
        "use_grpo", "model_path", "chat_template", "lora_rank", "lora_alpha", "profile", "cold_start_steps",
        "use_value_head", "use_kl_penalty",
    ]
    has_no_split = Path(now["dataset"]).suffix in SUFFIXES or now["dataset"].startswith("python:")
    if now["eval_limit"] and not now["eval_dataset"] and has_no_split:
        fixed += ["seed", "eval_limit"]                   # with the rows, these choose the held-out examples
        fixed += ["dataset"] if "dataset" in others else []          # if its rows differ, not only its path
    if now["lr_schedule"] != "constant" and (checkpoint.parents[1] / "final").exists():      # it is complete
        fixed += ["max_steps", "num_epochs"]              # and its schedule has ended
    for name in fixed:
        if name in changed:
            raise ValueError(
                f"--{name}={now[name]}: this run began with {saved[name]!r}; start a new run, with a "
                "checkpoint as --model_path")
    # These change the examples, in a way that the fingerprints do not depend on.
    of_prompts = {"instruction", "max_prompt_length", "long_prompts"}
    for name, found in others.items():
        if not {*vars(config.data), "seed"} - of_prompts & {*changed}:
            raise ValueError(
                f"--{name}={now[name] or now['dataset']}: its examples have changed since this run began "
                f"({begun[name]}, now {found}); restore them, or start a new run, with a checkpoint as "
                "--model_path")
    if changed:
        notify("  note   changed: " + ", ".join(f"{name} {saved[name]} -> {now[name]}" for name in changed))


def parse_mesh(config: Config) -> dict[str, int]:
    """Return the device mesh: the sizes in --mesh, else all processes in fsdp. Raises ValueError."""
    processes, text = num_processes(), config.training.mesh
    sizes = [part.partition("=") for part in text.split(",")] if text else [("fsdp", "=", str(processes))]
    mesh = {"replicate": 1, "fsdp": 1, "tp": 1}
    mesh |= {name.strip(): int(size) if size.strip().isdigit() else 0 for name, _, size in sizes}
    if len(mesh) > 3 or math.prod(mesh.values()) != processes:
        raise ValueError(
            f"--mesh={text}: write some of replicate=K,fsdp=M,tp=N; K * M * N is the number of processes, "
            f"here {processes}")
    offloads = config.grpo.reference_offload and processes > 1
    reject(config.grpo, ("reference_offload", offloads, "not supported with several processes; remove it"))
    reject(
        config.model,
        ("precision", config.model.precision == "float16" and processes > 1,
         "not supported with several processes; use bfloat16"),
        ("lora_rank", config.model.lora_rank and mesh["tp"] > 1, "not with tp in --mesh; use only fsdp"))
    return mesh
