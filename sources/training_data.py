"""Load the training and held-out examples of a run, and handle prompts that are too long."""

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy

from config import Config
from data import as_messages, as_text
from sources import load_examples
from sources.readers import has_splits, refuse_split
from sources.token_check import encode_prompts

BLANK = "", "None", "nan", "[]"                           # cells without a value, as text


def load_data(
    config: Config, dataset: Sequence | None = None, eval_dataset: Sequence | None = None,
    notify: Callable | None = None,
) -> tuple[list[dict], list[dict]]:
    """Return (training examples, held-out examples) from the given examples, or else from config's sources.

    Held-out examples are not trained on, see example_key.

    notify  is called with a line about the forms of rows
    """
    data_config, limit = config.data, config.data.eval_limit
    limit = 256 if limit < 0 else limit                   # set_up has chosen it, see the flag
    columns = {name: getattr(data_config, f"{name}_column") for name in ("prompt", "answer", "completion")}
    options = dict(seed=config.training.seed, columns=columns)
    source = data_config.dataset if dataset is None else dataset
    held_out_source = (data_config.eval_dataset or None) if eval_dataset is None else eval_dataset
    if held_out_source is None and has_splits(source):
        held_out_source = source                          # another split
    refuse_split("train_split", data_config.train_split, "train", source)
    refuse_split("eval_split", data_config.eval_split, "test", held_out_source or source)
    examples, held_out = load_examples(source, data_config.train_split, notify=notify, **options), []
    if limit and held_out_source is not None:
        held_out = load_examples(held_out_source, data_config.eval_split, limit=limit, **options)
    elif limit:                                           # hold out some of the training examples
        order = random.Random(config.training.seed).sample(range(len(examples)), len(examples))
        count = min(limit, len(examples) // 5)
        held_out = [examples[i] for i in order[:count]]
        examples = [examples[i] for i in (order[count:] if data_config.shuffle else sorted(order[count:]))]
    has_environment = bool(config.grpo.environment)
    held_out_keys = {example_key(example, has_environment) for example in held_out}
    kept = [each for each in examples if example_key(each, has_environment) not in held_out_keys]
    if notify and len(kept) < len(examples):
        dropped = len(examples) - len(kept)
        notify(f"  note   {dropped} of {len(examples)} examples are also held out, and not trained on")
    if not kept:
        raise ValueError(
            f"--dataset={data_config.dataset}: all its prompts are held out; choose another --eval_dataset, "
            "or, if they are all the same, --eval_limit 0")
    return kept, held_out


def example_key(example: dict, has_environment: bool = False) -> str:
    """Return a text that is equal for the same examples: those whose prompts differ only in white space and
    case; with an environment, for which all columns are the scenario, those that are equal in all of them.
    """
    if has_environment:
        return json.dumps(example, default=repr, sort_keys=True, skipkeys=True)
    return " ".join(as_text(as_messages(example["prompt"])).casefold().split())


def instructed(example: dict, instruction: str) -> dict:
    """Return an example with an instruction before its prompt, or in the first message of a conversation."""
    if not instruction:
        return example
    prompt, example = example["prompt"], copy(example)
    if isinstance(prompt, str):
        example["prompt"] = f"{instruction}\n{prompt}"
    else:
        first = prompt[0] | {"content": f"{instruction}\n{prompt[0]['content'] or ''}"}
        example["prompt"] = [first, *prompt[1:]]
    return example


def note_unused(examples: list[dict], named: set[str], notify: Callable) -> None:
    """Print the columns that nothing reads. named: columns that are parameters of functions.

    Raises ValueError if some completions have a false label, which marks them as not to be imitated.
    """
    unused, rejected = Counter(), 0
    for example in examples:
        unread = example.keys() - named - {*getattr(example, "read", example)}
        is_false = "label" in unread and str(example["label"]).lower() == "false"
        rejected += is_false and bool(example.get("completion"))
        unused.update(name for name in example if name in unread and str(example[name]) not in BLANK)
    if rejected:
        raise ValueError(
            f"--dataset: {rejected} of {len(examples)} completions have a false label; remove them: "
            "data.filter(lambda row: row['label']), or data.remove_columns('label')")
    if unused:
        names = ", ".join(f"{name} ({count})" for name, count in unused.most_common())
        notify(f"  note   no prompt, completion or reward function uses these columns: {names}")


def fit_prompts(
    examples: list[dict], tokenizer, config: Config, notify: Callable
) -> tuple[list[dict], list[list[int]]]:
    """Raise ValueError for prompts longer than --max_prompt_length, or drop them, as --long_prompts says.

    returns  the examples with --instruction, and the token ids of their prompts
    """
    limit = config.data.max_prompt_length
    examples = [instructed(example, config.data.instruction) for example in examples]
    prompts = encode_prompts(examples, tokenizer, config.data.dataset)
    too_long = [i for i, ids in enumerate(prompts) if len(ids) > limit]
    if too_long and config.data.long_prompts == "error":
        raise ValueError(
            f"--max_prompt_length={limit}: {len(too_long)} of {len(examples)} prompts are longer, such as "
            f"{examples[too_long[0]]['prompt']!r:.40} with {len(prompts[too_long[0]])} tokens; raise it to "
            f"{max(map(len, prompts))}, or pass --long_prompts drop")
    if too_long:
        notify(f"{len(too_long)} of {len(examples)} prompts have more than {limit} tokens and are dropped")
    if examples and len(too_long) == len(examples):
        raise ValueError(f"--max_prompt_length={limit} --long_prompts drop: no prompt is left")
    kept = [i for i, ids in enumerate(prompts) if len(ids) <= limit]
    return [examples[i] for i in kept], [prompts[i] for i in kept]


def needs_demonstrations(config: Config) -> bool:
    """Return True if supervised steps are planned."""
    return not config.training.use_grpo or config.training.cold_start_steps > 0


def validate_demonstrations(config: Config, dataset: Sequence[dict]) -> None:
    """Raise ValueError if supervised steps are planned and examples have no demonstration."""
    without = sum(not example.get("completion") for example in dataset)
    if without and needs_demonstrations(config):
        raise ValueError(
            f"--dataset={config.data.dataset}: no completion for {without} of {len(dataset)} examples, which "
            "supervised steps need; name a --completion_column, use conversations (--prompt_column "
            "messages), or pass --use_grpo --cold_start_steps 0 to train on rewards only")
