"""
The configuration: every flag with its type, default, help text and bounds.

    python train.py [settings.json] [--flag value ...]
    Config(grpo=GRPOConfig(loss_type="gspo"), training=TrainingConfig(use_grpo=True, output_dir="run"))
    Config.from_profile("demo", loss_type="gspo", output_dir="run")

On the command line, later sources override earlier ones: defaults, profile (or the run that is resumed),
settings.json, flags. In Python, the defaults below apply, or a profile if it is named. Wrong values and
incompatible flags are rejected with a ValueError of one line.
"""

import dataclasses
import inspect
import json
import math
import operator
import os
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin

from grpo import BASELINES, LOSSES, SCALES

DEFAULT_REWARDS = {"correctness": 1.0, "reasoning_coherence": 0.2, "explanation_quality": 0.1}       # weights


def flag(default, help: str, **bounds: float):
    """Declare a flag: default, help text, and bounds of the value, such as ge=0 (or gt=, le=, lt=)."""
    kind = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return field(**kind, metadata={"help": help, "bounds": bounds})


@dataclass(frozen=True)
class ModelConfig:
    """The policy."""

    model_path: str = flag("", "hub id or folder of a language model; empty: the built-in tiny Gemma 3")
    attn_implementation: Literal["auto", "sdpa", "eager"] = flag(
        "auto", "attention in transformers, if prompts are not shared; auto: sdpa if supported, else eager")
    precision: Literal["auto", "float32", "bfloat16", "float16"] = flag(
        "auto", "precision of the layers and of frozen weights; trained weights, embedding, output head and "
        "softmax stay float32. auto: bfloat16 on a GPU or TPU that supports it, else float32")
    lora_rank: int = flag(0, "rank of LoRA adapters on linear layers; 0: train all weights", ge=0, le=2**16)
    lora_alpha: float = flag(32.0, "the adapters' output is scaled by lora_alpha / lora_rank", gt=0)
    trust_remote_code: bool = flag(False, "run Python code that comes with the model")
    device: Literal["auto", "cpu"] = flag("auto", "auto: a GPU that torch supports, else the CPU")
    chat_template: Literal["auto", "none"] = flag(
        "auto", "auto: use the tokenizer's chat template, if it has one; none: do not format text prompts, "
        "for base models or if they are already formatted")
    chat_template_kwargs: str = flag(
        "", 'variables of the chat template, as JSON: {"enable_thinking": false}; empty: those that an '
        "earlier run saved with the model, else none")

    def __post_init__(self):
        if isinstance(self.chat_template_kwargs, dict):   # from a settings file or Python
            object.__setattr__(self, "chat_template_kwargs", json.dumps(self.chat_template_kwargs))
        check_values(self)
        try:
            dict(**json.loads(self.chat_template_kwargs or "{}"))
        except (ValueError, TypeError):
            fix = 'must be a JSON object of the template\'s own variables, such as {"enable_thinking": false}'
            reject(self, ("chat_template_kwargs", True, fix))


@dataclass(frozen=True)
class DataConfig:
    """The problems."""

    dataset: str = flag(
        "arithmetic", "arithmetic, countdown or guess_letter; reasoning_gym:TASK,TASK; a .jsonl, .json, .csv "
        "or .parquet file; a hub id (name:configuration); tfds:name; kaggle:owner/name/file.csv")
    eval_dataset: str = flag(
        "", "held-out problems; empty: eval_split of dataset, or eval_limit problems set aside from a file")
    train_split: str = flag("train", "split of dataset on a hub, or a part of a split such as train[:90%]")
    eval_split: str = flag("test", "split with the held-out problems, of eval_dataset or else of dataset")
    prompt_column: str = flag(
        "", "column of the prompt in dataset and eval_dataset, or text with columns in braces, such as "
        "'Make {target} from {nums}.'; empty: search for a usual name")
    answer_column: str = flag("", "column of the answer; empty: search for a usual name")
    completion_column: str = flag("", "column of the demonstration; empty: search for a usual name")
    eval_limit: int = flag(
        -1, "held-out problems per evaluation; 0: no evaluations; -1: 256, but 64 for a model_path on a CPU, "
        "where more take long", ge=-1)
    shuffle: bool = flag(
        True, "shuffle the rows in every epoch; false: keep the order of the source, such as a file sorted "
        "from easy to hard; the built-in problems are always shuffled by the seed")
    instruction: str = flag("", "text to insert before every prompt, such as the answer format")
    max_prompt_length: int = flag(512, "longest prompt, in tokens", gt=0)
    long_prompts: Literal["error", "drop"] = flag(
        "error", "prompts longer than max_prompt_length: stop with an error, or drop them")

    def __post_init__(self):
        check_values(self)


@dataclass(frozen=True)
class GRPOConfig:
    """Sampling, rewards, advantages and loss."""

    # A step of GRPO. Its variants follow.
    num_completions_per_prompt: int = flag(4, "G, the group size: completions per prompt", ge=2, le=2**16)
    generation_max_length: int = flag(256, "longest completion, in tokens", gt=0)
    generation_temperature: float = flag(
        1.0, "divides the logits, in sampling and training; 1: the model's own distribution; 0: greedy, for "
        "evaluation only", ge=0)
    reward_functions: list[str] = flag(list(DEFAULT_REWARDS), "built-in names, or path/to/file.py:function")
    reward_weights: list[float] = flag(
        [], "weight of each reward function; empty: 1 each, or 1 0.2 0.1 for the default functions")
    loss_type: Literal[*LOSSES] = flag(
        "dapo", "policy loss: with clipped ratios (dapo, grpo, dr_grpo), one ratio per completion (gspo), "
        "capped weights (cispo, scale_rl), a smooth limit (sapo), masking of tokens or completions whose "
        "ratio has moved too far from 1 (dppo, icepop, sequence_mask), or no ratios (reinforce)")
    clip_low: float = flag(
        0.2, "clipped losses limit the ratio, new / old probability of a token, to at least 1 - clip_low; "
        "before the first update the ratio is 1", ge=0, lt=1)
    clip_high: float = flag(
        0.2, "the upper limit of the ratio is 1 + clip_high; papers use 4e-4 with gspo, and values above 1 "
        "with cispo and scale_rl", ge=0)
    ppo_epochs: int = flag(1, "epochs of updates on each rollout", gt=0)
    minibatch_size: int = flag(0, "completions per optimiser step; 0: the whole rollout", ge=0)
    use_kl_penalty: bool = flag(
        False, "penalise the KL to a reference, by default a copy of the initial policy in memory; DAPO, "
        "Dr. GRPO and TRL train without one")
    kl_penalty_coef: float = flag(
        0.01, "weight of the KL penalty, in units of advantage per nat; 0: no penalty, no reference", ge=0)

    # Sampling
    generation_top_p: float = flag(1.0, "keep likely tokens up to this total probability; 1: all", gt=0, le=1)
    generation_top_k: int = flag(0, "keep this many of the most likely tokens; 0: all", ge=0)
    generation_min_p: float = flag(
        0.0, "keep tokens at least this many times as likely as the likeliest one; applied first, before "
        "top_k and then top_p; 0: all", ge=0, lt=1)
    generation_batch_size: int = flag(
        0, "completions sampled at once, at least one group; halved when memory runs out; 0: all", ge=0)
    engine: Literal["auto", "plain", "shared", "vllm"] = flag(
        "auto", "plain: forward each completion with its prompt; shared: forward each prompt once for all "
        "its completions; auto: shared on CUDA, or if it saves a fifth of the tokens, provided that results "
        "are equal; vllm: sample with vLLM, which is faster on a GPU (docs/scale.md, vLLM)")
    engine_memory: float = flag(0.3, "vllm: share of the GPU's memory during sampling", gt=0, lt=1)
    dynamic_sampling: int = flag(
        0, "maximum number of extra sampling rounds, which replace zero-variance groups by new prompts", ge=0)

    # Conversations
    environment: str = flag(
        "", "function or class that replies to the policy: calculator, python, guess_letter, or "
        "path/to/file.py:name; empty: completions are single messages")
    max_turns: int = flag(
        1, "maximum number of the policy's messages per conversation, all within generation_max_length", gt=0)

    # Rewards
    reward_errors: Literal["raise", "none"] = flag(
        "raise", "if a reward function raises: stop the run, or count the completions as unscored")
    reward_timeout: float = flag(
        0.0, "time limit of a reward function, in seconds; 0: none (environment classes: 60)", ge=0)
    reward_combination: Literal["sum", "gdpo"] = flag(
        "sum", "sum: add up the weighted rewards of the functions; gdpo: their weighted advantages")
    reward_clip: float = flag(0.0, "clip rewards to -reward_clip ... reward_clip; 0: no limit", ge=0)
    overlong: Literal["keep", "mask", "penalise"] = flag(
        "keep", "completions truncated at generation_max_length: keep; mask: exclude them from the loss; "
        "penalise: subtract up to 1 from rewards in the last fifth before the limit")

    # Advantages
    normalize_advantages: bool = flag(
        True, "divide advantages according to advantage_scale; with a value head, centre and scale them over "
        "all tokens; Dr. GRPO: false, with --loss_type dr_grpo")
    advantage_scale: Literal[*SCALES[:-1]] = flag(
        "group", "divide by the standard deviation of the group or of the batch, or by the group's mean")
    baseline: Literal[*BASELINES] = flag(
        "group_mean", "subtracted from rewards: the group's mean or median; global_mean: the mean of all "
        "rewards of the run so far; leave_one_out: the mean of the group's other completions")

    # The loss
    loss_options: list[str] = flag([], "options of loss_type, such as dual_clip=3 (docs/algorithm.md)")
    importance_cap: float = flag(
        0.0, "truncated importance sampling: multiply a token's loss by trainer / sampler probability, at "
        "most this cap; 0: 2 with --engine vllm, which rounds differently, else none", ge=0)
    entropy_coef: float = flag(0.0, "weight of the entropy bonus, in units of advantage per nat", ge=0)

    # The reference
    kl_in: Literal["loss", "reward"] = flag(
        "loss", "add the KL penalty to the loss, or subtract it from rewards (and so from the advantages)")
    kl_estimator: Literal["", "ratio_k3", "k3", "k2", "k1", "exact"] = flag(
        "", "how to estimate the KL from the sampled tokens; exact: compute it over the vocabulary; empty: "
        "ratio_k3 in the loss, k1 in the reward")
    reference_path: str = flag(
        "", "hub id or folder of the reference, another model with the same tokenizer, such as a larger "
        "teacher; empty: a copy of the policy")
    reference_mode: Literal["static", "ema", "periodic"] = flag(
        "static", "ema: moving average of the policy; periodic: copy it every reference_update_freq steps")
    ema_alpha: float = flag(
        0.99, "ema: reference = ema_alpha * reference + (1 - ema_alpha) * policy, every update", ge=0, le=1)
    reference_update_freq: int = flag(500, "periodic: steps between copies of the policy", gt=0)
    reference_offload: bool = flag(False, "keep the reference on the CPU between rollouts")

    # A critic
    use_value_head: bool = flag(False, "compute advantages by a value head (GAE), not within groups")
    gae_gamma: float = flag(1.0, "value head: discount of rewards per token", ge=0, le=1)
    gae_lambda: float = flag(0.95, "value head: 0: one-step TD error, 1: return minus value", ge=0, le=1)

    def __post_init__(self):
        if isinstance(self.loss_options, dict):           # from a settings file or Python
            options = [f"{name}={value}" for name, value in self.loss_options.items()]
            object.__setattr__(self, "loss_options", options)
        check_values(self)

    @property
    def weights(self) -> list[float]:
        """Return one weight for each reward function."""
        if self.reward_functions == list(DEFAULT_REWARDS):
            return self.reward_weights or list(DEFAULT_REWARDS.values())
        return self.reward_weights or [1.0] * len(self.reward_functions)

    @property
    def environment_weight(self) -> float:
        """Return the weight of the environment's rewards, 0 if the reward ignores them."""
        return dict(zip(self.reward_functions, self.weights, strict=False)).get("environment", 0.0)

    @property
    def kl_coef(self) -> float:
        """Return the weight of the KL penalty, 0 if it is switched off."""
        return self.kl_penalty_coef if self.use_kl_penalty else 0.0

    @property
    def kl_term(self) -> bool:
        """Return True if the KL penalty is a term of the loss."""
        return self.kl_coef > 0 and self.kl_in == "loss"

    @property
    def exact_kl(self) -> bool:
        """Return True if that term is the exact KL, so that the reference is forwarded with the policy."""
        return self.kl_term and self.kl_estimator == "exact"

    @property
    def policy_loss_alone(self) -> bool:
        """Return True if the loss of train.py has no other term. Then rows need a nonzero advantage."""
        return not (self.kl_term or self.entropy_coef or self.use_value_head)

    @property
    def scale(self) -> str:
        """Return the scale of compute_group_advantages."""
        return self.advantage_scale if self.normalize_advantages else "none"

    @property
    def importance_weight_cap(self) -> float:
        """Return the cap of importance weights; 0 if there are no such weights."""
        rounds_differently = self.engine == "vllm" and not LOSSES[self.loss_type].corrects_sampler
        return self.importance_cap or (2.0 if rounds_differently else 0.0)

    @property
    def loss_arguments(self) -> dict:
        """Return keyword arguments for policy_loss and token_loss."""
        clips = dict(clip_low=self.clip_low, clip_high=self.clip_high)
        return dict(loss_type=self.loss_type) | clips | parse_options(self.loss_options)

    @property
    def aggregation(self) -> str:
        """Return how token_weights averages over tokens."""
        return LOSSES[self.loss_type].aggregation


@dataclass(frozen=True)
class TrainingConfig:
    """The run: updates, checkpoints, evaluations and records."""

    use_grpo: bool = flag(False, "train on rewards by GRPO; else supervised training on demonstrations")
    profile: str = flag(
        "", "settings to start from: demo, guess_letter, demo_supervised, conservative, balanced or "
        "aggressive; empty: demo (demo_supervised without use_grpo) if model_path is empty, else none")
    output_dir: str = flag("", "run folder; empty: outputs/<time>")
    resume: bool = flag(False, "continue the run in output_dir from its last checkpoint, with its settings")
    check: bool = flag(False, "check the set-up, print rewards of right and wrong completions, and stop")
    seed: int = flag(0, "seed of weights, data order, sampling and global random numbers", ge=0, le=2**32 - 1)
    num_epochs: float = flag(3, "epochs over the examples; dynamic_sampling may use more", gt=0, le=10**6)
    max_steps: int = flag(
        0, "maximum number of steps of each phase, also of the cold start; 0: as num_epochs says", ge=0)
    batch_size: int = flag(4, "prompts per rollout; demonstrations per optimiser step", gt=0, le=2**20)
    cold_start_steps: int = flag(0, "supervised steps before GRPO, on the dataset's demonstrations", ge=0)
    cold_start_accuracy: float = flag(
        1.0, "held-out accuracy that ends the cold start; if below 1, evaluate every eval_steps / 3 steps")
    cold_start_learning_rate: float = flag(5e-5, "peak learning rate of the cold start", ge=0, le=0.1)
    learning_rate: float = flag(
        0.0, "peak learning rate; 0: 1e-6 for GRPO, as in most papers, and 1e-5 for supervised training; ten "
        "times as much with lora_rank", ge=0, le=0.1)
    lr_schedule: Literal["constant", "linear", "cosine"] = flag(
        "cosine", "learning-rate schedule after the warm-up")
    warmup_ratio: float = flag(0.1, "share of a phase's steps with a rising learning rate", ge=0, le=1)
    max_grad_norm: float = flag(1.0, "clip the gradient norm to this value", gt=0)
    max_tokens_per_forward: int = flag(
        0, "tokens per forward pass, halved when memory runs out; the gradient does not depend on it; 0: "
        "2048 on a CPU, else 8192, but at least twice the longest prompt", ge=0)
    gradient_checkpointing: bool = flag(False, "recompute activations: less memory, but a third more time")
    mesh: str = flag(
        "", "how weights are sharded: replicate=2,fsdp=4 keeps 2 copies, each sharded over 4 processes; "
        "fsdp=4,tp=2 also splits every layer's matrices between 2; empty: one copy sharded over all")
    eval_steps: int = flag(50, "steps between evaluations; 0: only before and after each phase", ge=0)
    save_steps: int = flag(100, "steps between checkpoints; 0: only at the end of each phase", ge=0)
    eval_samples: int = flag(
        1, "completions of each held-out problem; 2 or more: also pass@k and majority@n", gt=0, le=2**16)
    keep_best: bool = flag(
        False, "save the policy with the best evaluation in best/; the maximum of many evaluations is biased "
        "upwards")
    keep_checkpoints: int = flag(2, "number of checkpoints to keep; older ones are deleted", gt=0)
    log_rollouts_every: int = flag(10, "steps between entries in rollouts.jsonl; 0: none", ge=0)
    report_to: Literal["tensorboard", "wandb", "none"] = flag(
        "tensorboard", "tracker that receives the metrics in addition to metrics.jsonl")

    def __post_init__(self):
        check_values(self)


@dataclass(frozen=True)
class Config:
    """The whole configuration, in sections."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    grpo: GRPOConfig = field(default_factory=GRPOConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def __post_init__(self):
        for f in dataclasses.fields(self):
            if not isinstance(getattr(self, f.name), f.type):
                raise TypeError(f"Config: {f.name}={getattr(self, f.name)!r:.60} must be a {f.type.__name__}")
        check_combinations(self.grpo, self.training, self.updates_per_rollout)

    @classmethod
    def of(cls, /, **flags) -> "Config":
        """Return the configuration of flags by name: Config.of(use_grpo=True, loss_type="gspo")."""
        if unknown := [name for name in flags if name not in FLAGS]:
            raise ValueError(f"{', '.join(unknown)}: unknown; the flags are {', '.join(FLAGS)}")
        return cls(*(
            section(**{f.name: flags[f.name] for f in dataclasses.fields(section) if f.name in flags})
            for section in SECTIONS
        ))

    @classmethod
    def from_profile(cls, profile: str, /, **flags) -> "Config":
        """Return the configuration of a profile, with flags in place of its values."""
        return cls.of(**profile_values(profile, flags.get("batch_size")) | {"profile": profile} | flags)

    @property
    def rollout_size(self) -> int:
        """Return the number of completions in a rollout."""
        return self.training.batch_size * self.grpo.num_completions_per_prompt

    @property
    def updates_per_rollout(self) -> int:
        """Return the number of optimiser steps on each rollout."""
        size = self.rollout_size
        return self.grpo.ppo_epochs * math.ceil(size / (self.grpo.minibatch_size or size))

    @property
    def peak_learning_rate(self) -> float:
        """Return the peak learning rate of the last phase: --learning_rate, or its default."""
        default = (1e-6 if self.training.use_grpo else 1e-5) * (10 if self.model.lora_rank else 1)
        return self.training.learning_rate or default

    @property
    def flags(self) -> dict[str, Any]:
        """Return the value of each flag by its name."""
        return vars(self.model) | vars(self.data) | vars(self.grpo) | vars(self.training)

    def as_dict(self) -> dict[str, dict]:
        """Return the flags by section, as in config.json. START_FLAGS are not included."""
        sections = dataclasses.asdict(self)
        for name in START_FLAGS:
            del sections["training"][name]
        return sections


# ---- validation --------------------------------------------------------------------------------------------

BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}       # functions of operator
LARGEST = 2**32 - 1             # of any number of a flag: a seed, seconds that a timer can wait


def reject(section, *rules: tuple[str, Any, str]) -> None:
    """Raise ValueError for the first mistake. rules: flag, whether its value is wrong, how to correct it."""
    for name, mistaken, fix in rules:
        if mistaken:
            value = getattr(section, name)
            shown = " ".join(map(str, value)) if isinstance(value, list) else value
            raise ValueError(f"--{name}{'' if value is True else f'={shown}'}: {fix}")


def check_values(section) -> None:
    """Raise ValueError for the first flag whose value has a wrong type or is out of bounds."""
    for f in dataclasses.fields(section):
        name, value, bounds = f.name, getattr(section, f.name), f.metadata["bounds"]
        object.__setattr__(section, name, value := expand_home(value))
        if not has_type(value, f.type) and not (name == "loss_type" and value in LOSSES):  # added by a script
            raise ValueError(f"--{name}={value!s:.60}: {expected_value(name, value, f.type)}")
        inside = all(getattr(operator, bound)(value, limit) for bound, limit in bounds.items())
        words = " and ".join(f"{BOUNDS[bound]} {limit}" for bound, limit in bounds.items())
        reject(section, (name, not inside, f"must be {words} ({f.metadata['help']})"))
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int | float) and not abs(number) <= LARGEST:   # NaN too
                raise ValueError(f"--{name}={number!s:.30}: must be a number of at most {LARGEST} in size")


def expand_home(value):
    """Return a value, or a list of values, with ~/ in paths replaced, and with paths as text."""
    if isinstance(value, list):
        return list(map(expand_home, value))
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value


def has_type(value, kind) -> bool:
    """Return True if a value has the type of a flag. An int counts as a float, a bool as neither."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is list:
        return isinstance(value, list) and all(has_type(part, *get_args(kind)) for part in value)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def expected_value(name: str, value, kind) -> str:
    """Return the end of an error message: the values that a flag takes instead of this one."""
    if get_origin(kind) is Literal:
        return f"choose one of {', '.join(filter(None, get_args(kind)))}"
    expected = f"must be {kind if get_origin(kind) else kind.__name__}, not {type(value).__name__}"
    if name in ("reward_functions", "environment", "dataset", "eval_dataset"):
        expected += f"; pass Python objects to train(config, {name}=...)"
    return expected


def parse_options(options: list[str]) -> dict[str, float]:
    """Parse options of the form name=number. NaN stands for text that is not a number."""
    numbers = {}
    for name, _, text in (option.partition("=") for option in options):
        try:
            numbers[name] = float(text)
        except ValueError:
            numbers[name] = math.nan
    return numbers


def validate_functions(config: GRPOConfig) -> None:
    """Raise ValueError if other flags do not fit the reward functions or the environment.

    This is not part of __post_init__, because train(config, reward_functions=...) may replace both.
    """
    functions, weights = config.reward_functions, config.reward_weights
    reject(
        config,
        ("reward_functions", not functions, "name at least one; none: train only on the KL to a reference"),
        ("reward_weights", len(weights) not in (0, len(functions)),
         f"{len(weights)} weights for {len(functions)} reward functions; give one for each"),
        ("max_turns", config.max_turns > 1 and not config.environment,
         "there is no environment to continue the conversation; add --environment"),
        ("environment", config.environment and config.max_turns == 1,
         "with --max_turns=1 its messages would not be used; choose 2 or more"),
        ("reward_functions", "environment" in functions and not config.environment,
         "the reward function environment needs an environment: add --environment"),
    )


def check_combinations(config: GRPOConfig, training: TrainingConfig, updates_per_rollout: int) -> None:
    """Raise ValueError for flags that are valid on their own but incompatible."""
    reject(training, (
        "resume", training.resume and not training.output_dir, "needs --output_dir, the run to continue"))
    loss = LOSSES[config.loss_type]
    bounds = loss.bounds | {"off_policy_limit": (0.0, math.inf)}
    known = ", ".join(f"{name} from {low:g} to {high:g}" for name, (low, high) in bounds.items())
    for name, value in parse_options(config.loss_options).items():
        low, high = bounds.get(name, (math.nan, math.nan))
        fix = f"{config.loss_type} takes {known}, as name=number"
        reject(config, ("loss_options", not low <= value <= high, fix))
    estimator = config.kl_estimator
    has_ratio = "log_ratio" in inspect.signature(loss.per_token).parameters
    reject(
        config,
        ("importance_cap", 0 < config.importance_cap < 1,
         "a cap below 1 would shrink every token's weight; choose at least 1, such as 2, or 0 for no cap"),
        ("importance_cap", config.importance_cap and loss.corrects_sampler,
         f"the ratio of {config.loss_type} already corrects for the sampler; remove one of the two"),
        ("advantage_scale", config.scale == "mean" and (
            config.reward_combination == "gdpo" or config.overlong == "penalise"),
         "needs rewards >= 0; remove --reward_combination gdpo and --overlong penalise"),
        ("kl_estimator", config.kl_coef > 0 and config.kl_in == "reward" and estimator not in ("", "k1"),
         "in a reward only k1 moves the policy towards the reference; remove this flag"),
        ("kl_estimator", config.kl_term and estimator == "k1",
         "in a loss its expected gradient is 0; use ratio_k3, or --kl_in reward"),
        ("reference_offload", config.reference_offload and config.exact_kl,
         "--kl_estimator exact needs the reference in every forward pass; remove one of the two flags"),
        ("reference_path", config.reference_path and not config.kl_coef,
         "there is no KL penalty that would use it; add --use_kl_penalty true"),
        ("reference_mode", config.reference_path and config.reference_mode != "static",
         "the model of --reference_path is never updated; remove one of the two"),
        ("reward_functions", config.reward_functions == ["none"] and not config.kl_term,
         "nothing would be trained on; add --use_kl_penalty true and the --reference_path of a teacher"),
        ("baseline", config.use_value_head and config.baseline != "group_mean",
         "--use_value_head uses the value as the baseline; remove one of the two"),
        ("advantage_scale", config.use_value_head and config.advantage_scale != "group",
         "--use_value_head computes advantages without groups; remove one of the two"),
        ("dynamic_sampling", config.use_value_head and config.dynamic_sampling,
         "--use_value_head also uses zero-variance groups; remove one of the two"),
        ("reward_combination",
         config.use_value_head and config.reward_combination == "gdpo" and config.environment_weight,
         "--use_value_head uses the unscaled reward of each turn; remove one of the two"),
        ("generation_temperature", training.use_grpo and config.generation_temperature == 0,
         "all completions of a prompt would be equal, so all advantages 0; try 0.8"),
        ("loss_type", training.use_grpo and not has_ratio and updates_per_rollout > 1,
         f"has no ratio: of {updates_per_rollout} updates per rollout only the first is correct; use dapo"),
    )


# ---- names and profiles ------------------------------------------------------------------------------------

START_FLAGS = "resume", "check"  # not in config.json
SECTIONS = tuple(f.type for f in dataclasses.fields(Config))
FLAGS = {f.name: f for section in SECTIONS for f in dataclasses.fields(section)}
DEFAULTS = Config().flags       # flag -> its default

BUILT_IN = dict(generation_max_length=40)       # for the built-in model
# Values that replace defaults; flags replace both. Without a model_path the default profile is demo, or
# demo_supervised without use_grpo. The last three are ordered from small to large learning rates.
PROFILES: dict[str, dict[str, Any]] = {
    "demo": BUILT_IN | dict(
        cold_start_steps=300, cold_start_accuracy=0.33, cold_start_learning_rate=1e-3,
        batch_size=64, num_epochs=1.6, learning_rate=4e-4, eval_steps=15, save_steps=100),
    "guess_letter": BUILT_IN | dict(
        dataset="guess_letter", environment="guess_letter", max_turns=4, reward_functions=["environment"],
        use_value_head=True, cold_start_steps=200, cold_start_learning_rate=2e-3,
        batch_size=32, num_epochs=3, learning_rate=5e-4, eval_steps=40, save_steps=100),
    "demo_supervised": BUILT_IN | dict(batch_size=32, learning_rate=2e-3, eval_steps=100, save_steps=200),
    "conservative": dict(
        num_completions_per_prompt=32, batch_size=8, learning_rate=1e-6, max_grad_norm=0.5, warmup_ratio=0.2,
        eval_steps=25),
    "balanced": dict(
        num_completions_per_prompt=16, batch_size=4, learning_rate=5e-6, max_grad_norm=1.0, warmup_ratio=0.1,
        eval_steps=50),
    "aggressive": dict(
        num_completions_per_prompt=8, batch_size=2, learning_rate=1e-5, max_grad_norm=2.0, warmup_ratio=0.05,
        eval_steps=100),
}


def profile_values(profile: str, batch_size: int | None = None) -> dict[str, Any]:
    """Return the values of a profile; {} for the empty name.

    For another batch size, profiles of the built-in model scale numbers of steps so that they cover the same
    number of examples, and lower (never raise) learning rates by the square root of the ratio.
    """
    if profile not in ("", *PROFILES):
        raise ValueError(f"--profile={profile}: choose one of {', '.join(PROFILES)}")
    values = dict(PROFILES.get(profile, {}))
    if BUILT_IN.items() <= values.items() and type(batch_size) is int and batch_size > 0:
        ratio = batch_size / values["batch_size"]
        for name in values.keys() & {"cold_start_steps", "eval_steps", "save_steps"}:
            values[name] = math.ceil(values[name] / ratio)
        for name in values.keys() & {"cold_start_learning_rate", "learning_rate"}:
            values[name] = float(f"{values[name] * math.sqrt(min(1, ratio)):.3g}")
    return values
