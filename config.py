"""
What can be set: every flag with its type, default and help on one line, the profiles, and the command line.

    python train.py [settings.json] [--flag value ...]

Later wins: defaults, profile, settings.json, flags. A settings.json holds flags under the same names; the config.json of
a run is one. User mistakes end here, in one line, before anything is loaded.
"""

import ast
import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

DEFAULT_REWARDS = {"correctness": 1.0, "reasoning_coherence": 0.2, "explanation_quality": 0.1}
# What a run starts from; any flag overrides it. `demo` is taken when no --model_path is given, `demo_supervised` when
# --use_grpo is not given either. The other three are from cautious to bold.
PROFILES: dict[str, dict[str, Any]] = {
    "demo": dict(
        num_completions_per_prompt=4, generation_max_length=40, generation_temperature=1.0, generation_top_k=0,
        generation_top_p=1.0, use_kl_penalty=False, cold_start_steps=300, cold_start_accuracy=0.33,
        cold_start_learning_rate=1e-3, batch_size=64, num_epochs=1.6, learning_rate=4e-4, warmup_ratio=0.1, eval_steps=5,
        save_steps=100,
    ),
    "guess_letter": dict(
        dataset="guess_letter", environment="guess_letter", max_turns=4, reward_functions=["environment"],
        num_completions_per_prompt=4, generation_max_length=40, generation_temperature=1.0, generation_top_k=0,
        generation_top_p=1.0, use_kl_penalty=False, cold_start_steps=100, cold_start_learning_rate=2e-3, batch_size=32,
        num_epochs=2, learning_rate=4e-4, warmup_ratio=0.1, eval_steps=20, save_steps=100,
    ),
    "demo_supervised": dict(
        generation_max_length=40, generation_temperature=1.0, generation_top_k=0, generation_top_p=1.0,
        batch_size=32, learning_rate=2e-3, warmup_ratio=0.1, eval_steps=100, save_steps=200,
    ),
    "conservative": dict(
        num_completions_per_prompt=32, batch_size=8, learning_rate=1e-6, max_grad_norm=0.5, warmup_ratio=0.2, eval_steps=25,
    ),
    "balanced": dict(
        num_completions_per_prompt=16, batch_size=4, learning_rate=5e-6, max_grad_norm=1.0, warmup_ratio=0.1, eval_steps=50,
    ),
    "aggressive": dict(
        num_completions_per_prompt=8, batch_size=2, learning_rate=1e-5, max_grad_norm=2.0, warmup_ratio=0.05, eval_steps=100,
    ),
}


def table_keys(name: str) -> tuple[str, ...]:
    """Return the keys of a table in grpo.py. Reads its source: importing torch takes seconds, and --help should not."""
    tree = ast.parse((Path(__file__).parent / "grpo.py").read_text(encoding="utf-8"))
    assignments = (node for node in ast.walk(tree) if isinstance(node, ast.Assign))
    table = next(node.value for node in assignments if ast.unparse(node.targets[0]) == name)
    return tuple(key.value for key in table.keys)


def flag(default, help: str):
    """A field of a configuration: default and help text, which the command line shows."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


class Section:
    """A part of the configuration. It refuses a user's mistakes: one line with the flag, its value and what to do."""

    def require(self, name: str, condition: bool, fix: str) -> None:
        if not condition:
            value = getattr(self, name)
            shown = " ".join(map(str, value)) if isinstance(value, list) else value
            raise ValueError(f"--{name}{'' if value is True else f'={shown}'}: {fix}")


@dataclass(frozen=True)
class ModelConfig(Section):
    """Which policy."""

    model_path: str = flag("", "hub id or folder of a causal language model; empty: the built-in tiny Gemma 3")
    attn_implementation: Literal["sdpa", "eager"] = flag("sdpa", "attention of transformers, for passes without shared prompts")
    precision: Literal["float32", "bfloat16", "float16"] = flag("float32", "of the layers; weights, head, softmax stay float32")
    lora_rank: int = flag(0, "train additions of this rank to all linear layers (LoRA), not the weights; 0: the weights")
    lora_alpha: float = flag(32.0, "those additions are scaled by lora_alpha / lora_rank")
    trust_remote_code: bool = flag(False, "run Python code that comes with the model")

    def __post_init__(self):
        self.require("lora_rank", self.lora_rank >= 0, "a rank such as 16, or 0 to train the weights themselves")
        self.require("lora_alpha", self.lora_alpha > 0, "must be above 0")


@dataclass(frozen=True)
class DataConfig(Section):
    """Which problems."""

    dataset: str = flag("arithmetic", "arithmetic, countdown, guess_letter; a .jsonl, .json, .csv or .parquet file; a hub id "
                        "(name:configuration); tfds:name; kaggle:owner/name/file.csv")
    eval_dataset: str = flag("", "held-out problems; empty: the test split, or for a file eval_limit problems set aside")
    prompt_column: str = flag("", "which column is the prompt, also of eval_dataset; empty: one of the usual names")
    answer_column: str = flag("", "the same for the answer")
    completion_column: str = flag("", "the same for the demonstration")
    limit: int = flag(0, "use at most so many training examples, from the start; 0: all")
    eval_limit: int = flag(256, "held-out problems per evaluation; 0: never evaluate")
    bad_lines: Literal["error", "skip"] = flag("error", "what happens to lines of a .jsonl file that are not JSON")
    instruction: str = flag("", "text put before every prompt, such as how to form the answer")
    max_prompt_length: int = flag(512, "longest prompt in tokens")
    long_prompts: Literal["error", "truncate", "drop"] = flag("error", "what happens to longer ones; truncate cuts on the left")
    prefer_mixed: bool = flag(False, "after the first epoch pass over, by chance, prompts that always earn the same")

    def __post_init__(self):
        self.require("limit", self.limit >= 0, "a number of examples, or 0 for all")
        self.require("eval_limit", self.eval_limit >= 0, "a number of problems, or 0 to never evaluate")
        self.require("max_prompt_length", self.max_prompt_length > 0, "needs at least one token")

    @property
    def columns(self) -> dict[str, str]:
        """Which column is what, for load_examples."""
        return {"prompt": self.prompt_column, "answer": self.answer_column, "completion": self.completion_column}


@dataclass(frozen=True)
class GRPOConfig(Section):
    """How completions are sampled, scored and learned from."""

    num_completions_per_prompt: int = flag(4, "G, the group size")
    generation_max_length: int = flag(256, "longest completion in new tokens")
    generation_temperature: float = flag(0.8, "divides the logits, in sampling and in training")
    generation_top_p: float = flag(0.9, "keep the likeliest tokens up to this probability; 1: all")
    generation_top_k: int = flag(50, "keep so many likeliest tokens; 0: all")
    generation_batch_size: int = flag(0, "completions sampled at once, less memory; others wait until some end; 0: all")
    dynamic_sampling: int = flag(0, "sample up to so many more times a step, to replace groups of equal rewards by new prompts")

    environment: str = flag("", "who answers the policy: calculator, python, guess_letter, or path/to/file.py:function")
    max_turns: int = flag(1, "of the policy in a conversation with the environment; generation_max_length counts all of it")

    reward_functions: list[str] = flag(list(DEFAULT_REWARDS), "names from rewards.py, or path/to/file.py:function")
    reward_weights: list[float] = flag([], "one for each; empty: 1 each, or 1 0.2 0.1 for the default functions")
    reward_errors: Literal["raise", "none"] = flag("raise", "a reward function that raises: stop, or leave unscored and count")
    reward_timeout: float = flag(0.0, "seconds a reward function may take for a rollout; more counts as raising; 0: any time")
    reward_combination: Literal["sum", "gdpo"] = flag("sum", "weighted sum of the functions' points; or of their advantages")
    reward_clips: list[float] = flag([], "cut each function's points to so many up and down, one for each; 0: never")
    reward_clip: float = flag(0.0, "cut rewards to this many points up and down; 0: never")
    overlong: Literal["keep", "mask", "penalise"] = flag("keep", "completions cut at the limit: train on them, leave them out "
                                                         "of the loss, or take up to 1 point off as they come near the limit")
    overlong_buffer: int = flag(0, "tokens before the limit in which that penalty rises; 0: a fifth of generation_max_length")

    normalize_advantages: bool = flag(True, "divide by the standard deviation; without it, Dr. GRPO")
    advantage_scale: Literal[*(name for name in table_keys("scales") if name != "none")] = flag(
        "group", "divide by the standard deviation of each group, or of the batch")
    advantage_epsilon: float = flag(1e-8, "added to that standard deviation")
    baseline: Literal[table_keys("baselines")] = flag(
        "group_mean", "what rewards are compared with; global_mean: the mean of all rewards of the run so far")

    loss_type: Literal[table_keys("LOSSES")] = flag("dapo", "how tokens are clipped and averaged, see grpo.py")
    loss_aggregation: Literal["", *table_keys("aggregations")] = flag(
        "", "how tokens are averaged; empty: as the loss type does")
    clip_low: float = flag(0.2, "a token's probability ratio may fall to 1 - clip_low before its gradient ends")
    clip_high: float = flag(0.2, "and rise to 1 + clip_high; inert with one update per rollout")
    dual_clip: float = flag(0.0, "where the advantage is negative, end the gradient above this ratio too, such as 3; 0: never")
    importance_cap: float = flag(0.0, "weigh tokens by trainer's / sampler's probability up to this; 0: ratios to the sampler")
    entropy_coef: float = flag(0.0, "points per nat of entropy added to what is maximised")

    ppo_epochs: int = flag(1, "passes over a rollout")
    minibatch_size: int = flag(0, "completions per optimiser step, shuffled, best a multiple of G; 0: all of a rollout")
    max_policy_kl: float = flag(0.0, "end a rollout's updates when the policy has moved so many nats per token; 0: never")

    use_kl_penalty: bool = flag(True, "keep the policy near a frozen copy of itself, the reference")
    kl_penalty_coef: float = flag(0.01, "weight of that penalty, points per nat; 0 loads no copy")
    kl_in: Literal["loss", "reward"] = flag("loss", "where the penalty goes")
    kl_estimator: Literal["", "ratio_k3", "k3", "k2", "k1", "exact"] = flag(
        "", "from the sampled tokens; or exact, over the vocabulary. empty: ratio_k3 in the loss, k1 in the reward")
    kl_target: float = flag(0.0, "nats per token towards which the weight of the penalty adapts; 0: it is constant")
    kl_horizon: int = flag(10000, "completions over which it adapts by at most 20 %")
    reference_mode: Literal["static", "ema", "periodic"] = flag("static", "stays; follows slowly; is replaced now and then")
    ema_alpha: float = flag(0.99, "ema: reference = ema_alpha * reference + (1 - ema_alpha) * policy, after every update")
    reference_update_freq: int = flag(500, "periodic: optimiser steps between replacements by the policy")
    reference_offload: bool = flag(False, "keep the reference on the CPU between rollouts")

    use_value_head: bool = flag(False, "advantages of tokens from a value head (GAE) instead of the group's")
    value_coef: float = flag(0.1, "weight of the value head's squared error in the loss")
    value_clip: float = flag(0.2, "values may move so many points from those at sampling time")
    gae_gamma: float = flag(1.0, "discount of rewards per token")
    gae_lambda: float = flag(0.95, "0: one-step error of the values, 1: return minus value")

    def __post_init__(self):
        size, functions = self.num_completions_per_prompt, self.reward_functions
        self.require("num_completions_per_prompt", size >= 2, "GRPO compares siblings, so it needs at least 2")
        self.require("generation_max_length", self.generation_max_length >= 1, "at least one token")
        self.require("generation_top_p", 0 < self.generation_top_p <= 1, "choose from (0, 1]; 1 keeps all")
        self.require(
            "generation_batch_size", self.generation_batch_size == 0 or self.generation_batch_size >= size,
            f"a group of {size} is sampled together; at least that many, or 0 for all",
        )
        self.require("clip_low", 0 <= self.clip_low < 1, "a ratio cannot fall below 0: choose from [0, 1)")
        for name in ("generation_temperature", "generation_top_k", "dynamic_sampling", "reward_timeout", "reward_clip",
                     "overlong_buffer", "advantage_epsilon", "clip_high", "dual_clip", "importance_cap", "entropy_coef",
                     "minibatch_size", "max_policy_kl", "kl_penalty_coef", "kl_target", "value_coef", "value_clip"):
            self.require(name, getattr(self, name) >= 0, "cannot be negative")
        for name in ("max_turns", "ppo_epochs", "kl_horizon", "reference_update_freq"):
            self.require(name, getattr(self, name) > 0, "must be above 0")
        for name in ("ema_alpha", "gae_gamma", "gae_lambda"):
            self.require(name, 0 <= getattr(self, name) <= 1, "choose from 0 to 1")
        self.require("reward_functions", len(functions) > 0, "name at least one")
        self.require(
            "reward_weights", len(self.reward_weights) in (0, len(functions)),
            f"{len(self.reward_weights)} weights for {len(functions)} reward functions, {' '.join(functions)}",
        )
        self.require(
            "reward_clips", len(self.reward_clips) in (0, len(functions)) and all(clip >= 0 for clip in self.reward_clips),
            f"one number from 0 up for each of the {len(functions)} reward functions, {' '.join(functions)}",
        )
        self.refuse_contradictions()

    def refuse_contradictions(self) -> None:
        """Settings that are fine alone and wrong together: what would come out is not what was asked for."""
        in_loss, in_reward = (self.kl_coef > 0 and self.kl_in == place for place in ("loss", "reward"))
        self.require(
            "max_turns", self.max_turns == 1 or self.environment,
            "nobody answers the policy: name an --environment, or leave it out",
        )
        self.require(
            "environment", self.max_turns > 1 or not self.environment,
            "with --max_turns=1 nobody hears what it says; choose 2 or more",
        )
        self.require(
            "reward_functions", "environment" not in self.reward_functions or self.environment,
            "nobody gives the points of environment: name an --environment",
        )
        self.require(
            "dual_clip", not self.dual_clip or self.loss_type not in ("cispo", "reinforce"),
            f"--loss_type={self.loss_type} clips no ratio",
        )
        self.require(
            "dual_clip", not self.dual_clip or self.dual_clip > 1 + self.clip_high,
            f"below 1 + clip_high it would end the gradient of ordinary tokens; choose above {1 + self.clip_high:g}, such as 3",
        )
        self.require(
            "importance_cap", not self.importance_cap or self.importance_cap >= 1,
            "a cap below 1 would shrink every token's weight; choose from 1 up, such as 2, or 0 for none",
        )
        self.require(
            "kl_estimator", not in_reward or self.estimator == "k1",
            "in a reward only k1 pulls the policy to the reference (near it, k2 and k3 hardly pull at all, and exact does not "
            "depend on the token); leave it out",
        )
        self.require(
            "kl_estimator", not in_loss or self.estimator != "k1",
            "in a loss its gradient is 0 on average, so nothing would hold the policy; take k2 (the same with the right "
            "gradient) or ratio_k3, or put it in the reward with --kl_in reward",
        )
        self.require(
            "reference_offload", not (self.reference_offload and self.kl_coef > 0 and self.estimator == "exact"),
            "--kl_estimator exact asks the reference in every pass; ratio_k3 does once a rollout",
        )
        self.require(
            "kl_target", not self.kl_target or self.kl_coef > 0,
            "there is no KL penalty to adapt; add --use_kl_penalty true and a --kl_penalty_coef to start from",
        )
        self.require(
            "overlong_buffer", not self.overlong_buffer or self.overlong == "penalise",
            f"--overlong={self.overlong} has no penalty that could rise; add --overlong penalise",
        )
        self.require(
            "overlong_buffer", self.overlong_buffer < self.generation_max_length,
            f"must be below --generation_max_length={self.generation_max_length}",
        )
        if self.use_value_head:
            self.require("value_coef", self.value_coef > 0, "--use_value_head would never learn; take 0.1")
            self.require(
                "baseline", self.baseline == "group_mean",
                "--use_value_head takes the value as the baseline; leave out one of the two",
            )
            self.require(
                "dynamic_sampling", not self.dynamic_sampling,
                "--use_value_head learns from groups of equal rewards too; leave out one of the two",
            )
            self.require(
                "reward_combination", not (self.environment_weight and self.reward_combination == "gdpo"),
                "--use_value_head takes the environment's points turn by turn as they are; leave out one of the two",
            )

    @property
    def weights(self) -> list[float]:
        """One weight for each reward function."""
        if self.reward_functions == list(DEFAULT_REWARDS):
            return self.reward_weights or list(DEFAULT_REWARDS.values())
        return self.reward_weights or [1.0] * len(self.reward_functions)

    @property
    def environment_weight(self) -> float:
        """What the points of the environment count for, 0 where they are no reward."""
        return dict(zip(self.reward_functions, self.weights, strict=True)).get("environment", 0.0)

    @property
    def kl_coef(self) -> float:
        """The weight of the KL penalty, 0 where it is switched off."""
        return self.kl_penalty_coef if self.use_kl_penalty else 0.0

    @property
    def scale(self) -> str:
        """What advantages are divided by, for compute_group_advantages."""
        return self.advantage_scale if self.normalize_advantages else "none"

    @property
    def advantage_options(self) -> dict:
        """Keyword arguments of compute_group_advantages."""
        return dict(baseline=self.baseline, scale=self.scale, epsilon=self.advantage_epsilon)

    @property
    def supervised(self) -> "GRPOConfig":
        """These settings with the loss of supervised training: REINFORCE, at temperature 1, without other terms."""
        return dataclasses.replace(
            self, loss_type="reinforce", loss_aggregation="", dual_clip=0.0, ppo_epochs=1, minibatch_size=0, kl_target=0.0,
            entropy_coef=0.0, generation_temperature=1.0, generation_top_k=0, generation_top_p=1.0, use_kl_penalty=False,
            use_value_head=False,
        )

    @property
    def loss(self) -> dict:
        """The kind of loss, for policy_loss."""
        return dict(
            loss_type=self.loss_type, clip_low=self.clip_low, clip_high=self.clip_high, dual_clip=self.dual_clip or None,
            aggregation=self.loss_aggregation or None,
        )

    @property
    def estimator(self) -> str:
        """How the KL is estimated, where --kl_estimator leaves it open too."""
        return self.kl_estimator or ("ratio_k3" if self.kl_in == "loss" else "k1")

    @property
    def policy(self) -> dict:
        """What turns logits into the distribution that is sampled from, for completion_log_probs."""
        return dict(temperature=self.generation_temperature, top_k=self.generation_top_k, top_p=self.generation_top_p)


@dataclass(frozen=True)
class TrainingConfig(Section):
    """How the policy is updated, and what is written down."""

    use_grpo: bool = flag(False, "learn from rewards; without it, supervised training on demonstrations")
    profile: str = flag("", f"settings to start from: {', '.join(PROFILES)}; empty: without a model_path the demo (or "
                        "demo_supervised), else none")
    output_dir: str = flag("", "the run folder; empty: outputs/<time>")
    resume: bool = flag(False, "continue the run in output_dir from its last checkpoint, with its settings")
    check: bool = flag(False, "make the start-up check, print all of it, and stop")
    explain: bool = flag(False, "take one group through one step, print every number on the way, and stop")
    replay: str = flag("", "a rollouts.jsonl: compute losses on it, with the settings of its run and any flags, and stop")
    seed: int = flag(0, "of weights, data order and sampling")
    num_epochs: float = flag(3, "passes over the training examples; max_policy_kl and dynamic_sampling can make it more")
    max_steps: int = flag(0, "end a phase after so many optimiser steps; 0: when its epochs are over")
    batch_size: int = flag(4, "prompts (or demonstrations) per optimiser step")
    cold_start_steps: int = flag(0, "supervised steps before GRPO, on the demonstrations of the data set")
    cold_start_accuracy: float = flag(1.0, "end the cold start early, at the first evaluation with this held-out accuracy")
    cold_start_learning_rate: float = flag(5e-5, "peak learning rate of the cold start")
    learning_rate: float = flag(5e-6, "peak learning rate")
    lr_schedule: Literal["constant", "linear", "cosine"] = flag("cosine", "what follows the warm-up")
    warmup_ratio: float = flag(0.1, "share of a phase's steps in which the learning rate rises")
    weight_decay: float = flag(0.0, "of AdamW")
    adam_beta2: float = flag(0.95, "of AdamW: gradients change fast here, and 0.999 remembers them for too long")
    adam_8bit: bool = flag(False, "keep AdamW's state in 8 bits, by torchao: two bytes a parameter, not eight")
    max_grad_norm: float = flag(1.0, "longer gradients are cut to this length")
    max_skipped_steps: int = flag(3, "stop after so many steps in a row whose loss or gradient was not finite")
    max_tokens_per_forward: int = flag(0, "tokens of a pass: lower it when memory runs out, the gradient stays the same; "
                                       "0: 2048 on a CPU, 8192 elsewhere")
    shared_prompt: Literal["auto", "never"] = flag("auto", "forward each prompt once for all of its completions; never: "
                                                   "forward every completion with a prompt of its own")
    gradient_checkpointing: bool = flag(False, "recompute activations in the backward pass: less memory, a third more time")
    mesh: str = flag("", "how processes share weights: replicate=2,fsdp=4 keeps 2 copies, each over 4; fsdp=4,tp=2 also "
                     "divides every layer's matrices between 2; empty: one copy over all")
    eval_steps: int = flag(50, "evaluate every so many steps, and before and after every phase")
    save_steps: int = flag(100, "write a checkpoint every so many steps; 0: at the end of a phase only")
    keep_checkpoints: int = flag(2, "delete older ones")
    log_rollouts_every: int = flag(10, "steps between entries in rollouts.jsonl, and between printed completions")
    log_groups: int = flag(0, "print rewards and advantages of the first so many groups of every step")
    report_to: Literal["tensorboard", "wandb", "trackio", "none"] = flag("tensorboard", "who gets the metrics, too")

    def __post_init__(self):
        self.require("profile", self.profile in ("", *PROFILES), f"choose one of {', '.join(PROFILES)}")
        for name in ("num_epochs", "batch_size", "max_grad_norm", "keep_checkpoints",
                     "max_skipped_steps"):
            self.require(name, getattr(self, name) > 0, "must be above 0")
        for name in ("learning_rate", "cold_start_learning_rate", "weight_decay", "max_steps", "cold_start_steps",
                     "max_tokens_per_forward", "eval_steps", "save_steps", "log_rollouts_every", "log_groups", "seed"):
            self.require(name, getattr(self, name) >= 0, "cannot be negative")
        self.require("adam_beta2", 0 <= self.adam_beta2 < 1, "choose from [0, 1), such as 0.95 or 0.999")
        self.require("warmup_ratio", 0 <= self.warmup_ratio <= 1, "a share of the steps, from 0 to 1")
        self.require("resume", not self.resume or self.output_dir, "needs --output_dir, the run to continue")


@dataclass(frozen=True)
class Config:
    """A whole run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    grpo: GRPOConfig = field(default_factory=GRPOConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def __post_init__(self):
        training, grpo, updates = self.training, self.grpo, self.updates_per_rollout
        training.require("explain", training.use_grpo or not training.explain, "it is a step of GRPO; add --use_grpo")
        if training.use_grpo:
            grpo.require(
                "generation_temperature", grpo.generation_temperature > 0,
                "siblings would all be equal and nothing could be learned; try 0.8",
            )
            grpo.require(
                "loss_type", grpo.loss_type != "reinforce" or updates == 1,
                f"has no ratio: of {updates} updates on a rollout only the first is right; take dapo",
            )
        rollout = training.batch_size * grpo.num_completions_per_prompt
        grpo.require(
            "kl_horizon", not grpo.kl_target or grpo.kl_horizon >= rollout,
            f"a step has {rollout} completions and would move the coefficient by more than 20 %; choose at least {rollout}",
        )

    @property
    def updates_per_rollout(self) -> int:
        """Optimiser steps on what was sampled once, if nothing ends them early."""
        completions = self.training.batch_size * self.grpo.num_completions_per_prompt
        return self.grpo.ppo_epochs * math.ceil(completions / (self.grpo.minibatch_size or completions))

    def remarks(self) -> list[str]:
        """Settings that change nothing in this run, or are seldom meant, one line each."""
        if not self.training.use_grpo:
            counted = "generation_", "environment", "max_turns"                  # in evaluations
            unused = [f.name for f in dataclasses.fields(GRPOConfig) if not f.name.startswith(counted)]
            unused += ["cold_start_steps", "cold_start_accuracy", "cold_start_learning_rate", "prefer_mixed", "log_groups",
                       "log_rollouts_every"]
            return self.inert([
                ("without --use_grpo", True, unused), ("without --lora_rank", not self.model.lora_rank, ["lora_alpha"]),
            ])
        grpo, training, several = self.grpo, self.training, self.updates_per_rollout > 1
        no_kl, critic = not grpo.kl_coef, grpo.use_value_head
        unscaled = not grpo.normalize_advantages and not critic
        lines = self.inert([
            ("without --lora_rank", not self.model.lora_rank, ["lora_alpha"]),
            ("without --cold_start_steps", not training.cold_start_steps, ["cold_start_learning_rate", "cold_start_accuracy"]),
            ("with --loss_type reinforce", grpo.loss_type == "reinforce", ["clip_low", "clip_high"]),
            ("without --use_value_head", not critic, ["value_coef", "value_clip", "gae_gamma", "gae_lambda"]),
            ("with a value head, which scales over the tokens of the step", critic, ["advantage_scale"]),
            ("without --normalize_advantages", unscaled, ["advantage_scale"]),
            ("without --normalize_advantages", unscaled and grpo.reward_combination == "sum", ["advantage_epsilon"]),
            ("without --use_kl_penalty true", no_kl and grpo.kl_penalty_coef > 0, ["kl_penalty_coef"]),
            ("without --use_kl_penalty true and a --kl_penalty_coef", no_kl, [
                "kl_in", "kl_estimator", "kl_horizon", "reference_mode", "ema_alpha", "reference_update_freq",
                "reference_offload"]),
            ("without --kl_target", not no_kl and not grpo.kl_target, ["kl_horizon"]),
            ("without --reference_mode ema", not no_kl and grpo.reference_mode != "ema", ["ema_alpha"]),
            ("without --reference_mode periodic", not no_kl and grpo.reference_mode != "periodic", ["reference_update_freq"]),
            ("with one epoch, in which no prompt comes again; --num_epochs makes more", training.num_epochs <= 1,
             ["prefer_mixed"]),
            ("with so few completions in a rollout",
             grpo.minibatch_size >= training.batch_size * grpo.num_completions_per_prompt, ["minibatch_size"]),
        ])
        if not several and grpo.loss_type != "reinforce":
            what = "clipping and max_policy_kl are" if grpo.max_policy_kl else "clipping is"
            lines.append(f"{what} inert: with one update per rollout every ratio is 1; --ppo_epochs makes more")
        if grpo.reward_combination == "gdpo" and grpo.scale == "group":
            lines.append("gdpo scales each function within its group, then the sum again; advantage_scale batch is the paper's")
        if grpo.loss_type == "gspo" and grpo.clip_high > 0.01 and several:
            lines.append("gspo's ratio is a mean over a completion and hardly moves: clip_low 3e-4, clip_high 4e-4 is usual")
        if grpo.loss_type == "cispo" and grpo.clip_high < 1 and several:
            lines.append(f"cispo caps a token's weight at {1 + grpo.clip_high:g}; clip_high of 4 or so is usual")
        if grpo.loss_type == "dr_grpo" and grpo.normalize_advantages:
            lines.append("dr_grpo is meant for advantages in points; --normalize_advantages false is the paper's")
        return lines

    def inert(self, rules: list[tuple[str, bool, list[str]]]) -> list[str]:
        """A line for every flag that was set and counts for nothing. rules: why, whether it is so here, and for which flags."""
        profile, lines = PROFILES.get(self.training.profile, {}), []
        for section in (self.model, self.data, self.grpo, self.training):
            for f in dataclasses.fields(section):
                default = f.default_factory() if f.default is dataclasses.MISSING else f.default
                value = getattr(section, f.name)
                if value != profile.get(f.name, default):
                    lines += [f"{f.name} {value} is inert {why}" for why, holds, flags in rules if holds and f.name in flags]
        return lines

    def as_dict(self) -> dict[str, dict]:
        """The fields by section, as written to config.json. What was asked of this start alone is left out."""
        sections = dataclasses.asdict(self)
        for name in "resume", "check", "explain", "replay":
            del sections["training"][name]
        return sections
