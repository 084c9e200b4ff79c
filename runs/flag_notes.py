"""
Notes on the flags of a run, printed at its start: flags without effect, combinations seldom intended, and
what the chat template does with its variables.
"""

from pathlib import Path

from config import FLAGS, Config, GRPOConfig
from sources.readers import READERS
from sources.settings import profile_values

OF_EVALUATIONS = "generation_", "environment", "max_turns", "engine"   # used without --use_grpo too


def flag_notes(settings: Config) -> list[str]:
    """Return a line for each flag without effect, and for each combination that is seldom intended."""
    config, training, several = settings.grpo, settings.training, settings.updates_per_rollout > 1
    loss = config.loss_entry
    split, is_file = settings.data.train_split, Path(settings.data.dataset).suffix in READERS
    combinations = {
        f"train_split {split} has no effect: a file has no splits": is_file and split != "train",
        "clipping and max_policy_kl have no effect: with one update per rollout every ratio is 1; see "
        "--ppo_epochs":
            training.use_grpo and "log_ratio" in loss.reads and not loss.weighs_sampler and not several,
        "gdpo scales each function in its group, then the sum; advantage_scale batch is the paper's":
            config.reward_combination == "gdpo" and config.scale == "group",
        f"advantage_scale {config.scale} has no effect with use_value_head, which scales over the step":
            config.use_value_head and config.scale not in ("group", "none"),
        f"{config.loss_type} corrects the sampler: with importance_cap its first ratios are 1":
            loss.weighs_sampler and config.importance_cap > 0,
        "dr_grpo is meant for advantages in points; --normalize_advantages false is the paper's":
            config.loss_type == "dr_grpo" and config.normalize_advantages,
    } | {
        f"{name} {getattr(config, name):g}: papers take {low:g} to {high:g} with {config.loss_type}":
            several and not low <= getattr(config, name) <= high
        for name, (low, high) in loss.usual.items()
    } | {
        f"{name} {getattr(config, name):g} has no effect with loss_type {config.loss_type}":
            getattr(config, name) != FLAGS[name].default and name not in loss.reads
        for name in ("clip_low", "clip_high")
    }
    return flags_without_effect(settings) + [line for line, holds in combinations.items() if holds]


def flags_without_effect(settings: Config) -> list[str]:
    """Return a line for each flag with a value of the user that needs another flag."""
    values, usual = {}, {}
    for section in settings.model, settings.data, settings.grpo, settings.training:
        values |= vars(section)
        usual |= vars(type(section)())
    usual |= profile_values(settings.training.profile, settings.training.batch_size)
    needs = {name: unmet_need(name, values) for name in FLAGS if values[name] != usual[name]}
    return [f"{name} {values[name]} has no effect without --{need}" for name, need in needs.items() if need]


def unmet_need(name: str, values: dict) -> str:
    """Return the flag, or flag=value, that a flag needs and that is not set, "" if there is none."""
    of_updates = name in GRPOConfig.__dataclass_fields__ and not name.startswith(OF_EVALUATIONS)
    need = FLAGS[name].metadata["needs"] or ("use_grpo" if of_updates else "")
    other, _, value = need.partition("=")
    if need and (values[other] == value if value else values[other]):
        return unmet_need(other, values)                  # which may need another one
    return need


def template_notes(tokenizer) -> list[str]:
    """Return a line for each variable that the chat template does not read, and for thoughts it may add."""
    template = str(tokenizer.chat_template or "")
    variables = tokenizer.init_kwargs.get("chat_template_kwargs", {})
    unread = [name for name in variables if name not in template]
    lines = [f"--chat_template_kwargs: the chat template does not read {name}" for name in unread]
    if "enable_thinking" in template and "enable_thinking" not in variables:
        lines.append("thoughts take thousands of tokens, if the model has them on; without them: "
                     """--chat_template_kwargs '{"enable_thinking": false}' (docs/recipes.md)""")
    return lines
