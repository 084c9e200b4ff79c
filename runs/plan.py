"""
Decide what a run does before its model is loaded, or raise ValueError with one line that names the setting to
change.

Cheap checks come first. config.py has rejected incompatible flags; here reward functions are imported, data
is read, the tokenizer loaded, and prompts are counted in tokens. runs/setup.py continues with the model.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from config import Config, ModelConfig, reject, validate_functions
from data import DAY
from engine.devices import all_gather_object, best_device, num_processes
from engine.errors import RunError
from engine.fingerprints import fingerprint_of_examples, fingerprint_of_functions, fingerprint_of_model
from engine.host import seed_generators
from engine.models import load_any_tokenizer, resolve_precision
from reward_functions.calling import parameters_of
from reward_functions.loading import as_name, load_reward_functions, require_columns
from runs.folder import RunFolder
from runs.phases import Phase, plan_phases
from sources.training_data import fit_prompts, load_data, note_unused, validate_demonstrations


@dataclass(frozen=True)
class Objects:
    """Python objects in place of settings: the arguments of train beside a Config. None: those of config.

    reward_functions, environment  names, functions, a class of environments
    dataset, eval_dataset          a source or examples for load_examples
    engine                         a subclass of Policy, or a function of its arguments that returns one
    optimizer                      a function of named parameters, [(name, parameter), ...], that returns a
                                   torch.optim.Optimizer, called at the start of every phase. Its own learning
                                   rates are the peaks of the schedule; None: AdamW
    reference                      another model with the same tokenizer, such as a teacher, for the KL
                                   penalty; None: a copy of the policy

    The last three are functions in place of those of train.py, for an idea that changes none of its files:

    advantages                     advantages(run, groups) -> (P, G)
    columns                        columns(run, experience, batch) -> {name: tensor}, for Batch.extra
    loss                           loss(grpo_config, new, batch) -> terms, metrics, as grpo_loss
    """

    reward_functions: str | Callable | Sequence[str | Callable] | None = None
    environment: str | Callable | None = None
    dataset: str | Sequence | None = None
    eval_dataset: str | Sequence | None = None
    engine: Callable | None = None
    optimizer: Callable | None = None
    reference: torch.nn.Module | None = None
    advantages: Callable | None = None
    columns: Callable | None = None
    loss: Callable | None = None

    @property
    def by_flag(self) -> dict:
        """Return the objects that replace the value of a flag, by its name."""
        functions = self.reward_functions
        single = isinstance(functions, str) or callable(functions)
        return dict(
            reward_functions=[functions] if single else functions and list(functions),
            environment=self.environment, dataset=self.dataset, eval_dataset=self.eval_dataset,
            reference_path=self.reference)

    @property
    def replacing_functions(self) -> list[str]:
        """Return the names of the functions that a resumed run needs again."""
        return [name for name in ("advantages", "columns", "loss", "optimizer") if getattr(self, name)]


@dataclass
class Data:
    """The examples of a run; and their prompts in token ids, once there is a tokenizer."""

    train_set: Sequence[dict]
    eval_set: Sequence[dict]
    fingerprints: dict[str, str]
    prompts: list[list[int]] = field(default_factory=list)           # of train_set
    held_out_prompts: list[list[int]] = field(default_factory=list)  # of eval_set

    @property
    def longest_prompt(self) -> int:
        return max(map(len, self.prompts), default=0)


@dataclass(frozen=True)
class Plan:
    """The settings, data and functions of a run, complete before its model is loaded."""

    config: Config                                        # max_tokens_per_forward may still be 0, not chosen
    objects: Objects
    device: torch.device
    mesh: dict[str, int]                                  # see parse_mesh
    folder: RunFolder
    reward_functions: list[Callable]
    environment: Callable | None
    data: Data
    tokenizer: Any
    phases: list[Phase]
    checkpoint: Path | None                               # to continue from
    model_config: ModelConfig                             # loads the policy, from the checkpoint if any


def resolve(config: Config, objects: Objects) -> Plan:
    """Return the plan of a run. Raises ValueError if a setting has to be changed."""
    refuse_unused(objects, config)
    given = objects.by_flag
    device = best_device(config.model.device)
    config = config_on_device(name_objects(config, given), device)
    seed_generators(config.training.seed)
    mesh = parse_mesh(config)
    folder = RunFolder(config)
    with folder.closed_on_error():
        notify = folder.console.print
        config = with_eval_limit(config, device, notify)
        functions, environment = load_functions(config, given)
        data = read_data(config, given["dataset"], given["eval_dataset"], notify)
        checkpoint = None
        if config.training.resume:
            from runs.resume import find_checkpoint       # only for this

            checkpoint = find_checkpoint(config, objects.replacing_functions, folder, data.fingerprints)
        model_config = replace(config.model, model_path=str(checkpoint)) if checkpoint else config.model
        tokenizer = prepare_tokenizer(config, model_config, environment, given["reference_path"], notify)
        fit_data(data, tokenizer, config, functions, environment, notify)
        refuse_other_settings(config, data.fingerprints)
    return Plan(
        config, objects, device, mesh, folder, functions, environment, data, tokenizer,
        plan_phases(config, len(data.train_set)), checkpoint, model_config)


def refuse_unused(objects: Objects, config: Config) -> None:
    """Raise ValueError if an object would not be used."""
    if objects.advantages and config.grpo.use_value_head:
        raise ValueError("advantages: --use_value_head replaces those of groups; remove one of the two")
    of_grpo = "reward_functions", "reference", "advantages", "columns", "loss"
    unused = [name for name in of_grpo if getattr(objects, name) is not None]
    if unused and not config.training.use_grpo:
        raise ValueError(f"{unused[0]}: only for GRPO; add --use_grpo")


def name_objects(config: Config, given: dict) -> Config:
    """Return the configuration with the names of the objects that were passed to train.

    given   Objects.by_flag
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
    """Return the configuration with this device's precision and absolute paths. Raises ValueError."""
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


def with_eval_limit(config: Config, device: torch.device, notify: Callable) -> Config:
    """Return the configuration with the default of --eval_limit on this device."""
    if config.data.eval_limit >= 0:
        return config
    limit = 64 if device.type == "cpu" and config.model.model_path else 256
    if limit == 64:
        notify("  note   at most 64 held-out problems, since this is a CPU: --eval_limit")
    return replace(config, data=replace(config.data, eval_limit=limit))


def load_functions(config: Config, given: dict) -> tuple[list[Callable], Callable | None]:
    """Return the reward functions and the environment: those given, or those of config."""
    names = given["reward_functions"] or config.grpo.reward_functions
    functions = load_reward_functions(names) if config.training.use_grpo else []
    environment = given["environment"] or config.grpo.environment
    if not environment:
        return functions, None
    from environments.instances import load_environment   # only with an environment

    return functions, load_environment(environment)


def read_data(config: Config, dataset, eval_dataset, notify: Callable) -> Data:
    """Return the examples of a run: those given, or those of config. Raises ValueError if they do not fit."""
    train_set, eval_set = load_data(config, dataset, eval_dataset, notify)
    files = [*config.grpo.reward_functions, config.grpo.environment]
    fingerprints = {
        "dataset": fingerprint_of_examples(train_set), "eval_dataset": fingerprint_of_examples(eval_set),
        "reward functions": fingerprint_of_functions(files),
        "teacher": fingerprint_of_model(config.grpo.reference_path),
    }
    if config.training.keep_best and not eval_set:
        raise ValueError("--keep_best: needs held-out problems: an --eval_limit above 0, or a larger file")
    validate_demonstrations(config, train_set)
    return Data(train_set, eval_set, fingerprints)


def has_teacher(config: Config) -> bool:
    """Return True if the reference is another model, named by a flag or passed as an object."""
    return bool(config.training.use_grpo and config.grpo.reference_path)


def prepare_tokenizer(
    config: Config, model_config: ModelConfig, environment: Callable | None,
    reference: torch.nn.Module | None, notify: Callable,
):
    """Load the tokenizer of a run, with what prompts depend on. Raises ValueError if it does not fit."""
    tokenizer = load_any_tokenizer(model_config)
    if has_teacher(config) and reference is None:
        from engine.reference import compare_tokenizers   # here and below: only if needed

        compare_tokenizers(tokenizer, config)
    if config.training.use_grpo and config.grpo.reward_functions == ["none"] and not has_teacher(config):
        raise ValueError("--reward_functions=none: needs a teacher; add --reference_path")
    if "strftime_now" in str(tokenizer.chat_template):
        notify(f"  note   the chat template writes the date; in all prompts it is {DAY:%d %b %Y}")
    if environment:
        from environments.instances import offer_tools

        offer_tools(tokenizer, environment, notify)
    return tokenizer


def fit_data(data: Data, tokenizer, config: Config, functions: list, environment, notify: Callable) -> None:
    """Check the columns of the examples, encode their prompts, and drop those that are too long."""
    if config.training.use_grpo:
        validate_grpo_setup(
            config, tokenizer, data.train_set, reward_functions=functions, environment=environment)
    named = parameters_of([*functions, getattr(environment, "reset", environment)])
    note_unused(data.train_set, named, notify)
    data.train_set, data.prompts = fit_prompts(data.train_set, tokenizer, config, notify)
    data.eval_set, data.held_out_prompts = fit_prompts(data.eval_set, tokenizer, config, notify)


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


def refuse_other_settings(config: Config, fingerprints: dict[str, str]) -> None:
    """Raise RunError, on all ranks, if the settings or examples of ranks differ."""
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
