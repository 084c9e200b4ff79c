"""Load the training and held-out examples of a run, and handle prompts that are too long."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from config import Config
from data import COLUMNS, as_messages, as_text, encode_prompt
from environments.messages import encode_turns, unwritten_entries
from guards import without_special_tokens
from sources import load_examples
from sources.readers import SUFFIXES

BLANK = "", "None", "nan", "[]"                           # cells without a value, as text


def load_data(
    config: Config, dataset: Sequence | None = None, eval_dataset: Sequence | None = None
) -> tuple[list[dict], list[dict]]:
    """Return (training examples, held-out examples) from the given examples, or else from config's sources.

    Held-out prompts are removed from the training examples, even if they differ in white space or case.
    """
    data_config, limit = config.data, config.data.eval_limit
    limit = 256 if limit < 0 else limit
    columns = {name: getattr(data_config, f"{name}_column") for name in COLUMNS}
    options = dict(seed=config.training.seed, columns=columns)
    source = data_config.dataset if dataset is None else dataset
    held_out_source = (data_config.eval_dataset or None) if eval_dataset is None else eval_dataset
    if held_out_source is None and isinstance(source, str) and Path(source).suffix not in SUFFIXES:
        held_out_source = source                          # another split
    examples, held_out = load_examples(source, data_config.train_split, **options), []
    if limit and held_out_source is not None:
        held_out = load_examples(held_out_source, data_config.eval_split, limit=limit, **options)
    elif limit:                                           # hold out some of the training examples
        order = random.Random(config.training.seed).sample(range(len(examples)), len(examples))
        count = min(limit, len(examples) // 5)
        held_out = [examples[i] for i in order[:count]]
        examples = [examples[i] for i in (order[count:] if data_config.shuffle else sorted(order[count:]))]
    held_out_keys = {prompt_key(example["prompt"]) for example in held_out}
    examples = [example for example in examples if prompt_key(example["prompt"]) not in held_out_keys]
    if not examples:
        raise ValueError(
            f"--dataset={data_config.dataset}: all its prompts are held out; choose another --eval_dataset, "
            "or, if they are all the same, --eval_limit 0")
    return examples, held_out


def instructed(example: dict, instruction: str) -> dict:
    """Return an example with an instruction before its prompt, or in the first message of a conversation."""
    prompt = example["prompt"]
    if not instruction:
        return example
    if isinstance(prompt, str):
        return example | {"prompt": f"{instruction}\n{prompt}"}
    first, *rest = prompt
    return example | {"prompt": [first | {"content": f"{instruction}\n{first['content'] or ''}"}, *rest]}


def leave_out_rejected(examples: list[dict], named: set[str], notify: Callable) -> list[dict]:
    """Remove examples with a completion whose column label is false (unpaired preferences).

    named  columns that are parameters of reward functions or an environment; label is added
    """
    kept = [
        example for example in examples
        if not example.get("completion") or str(dict(unread(example, named)).get("label")).lower() != "false"]
    if len(kept) < len(examples):
        named.add("label")
        rejected = len(examples) - len(kept)
        notify(f"  note   {rejected} of {len(examples)} completions have a false label and are not used")
    if not kept:
        raise ValueError("--dataset: the label of all completions is false; correct the column label")
    return kept


def note_unused(examples: list[dict], named: set[str], tokenizer, notify: Callable) -> None:
    """Print the columns that nothing reads, and the entries of messages that the template does not render."""
    unused, unwritten_of = Counter(), {}
    for example in examples:
        unused.update(name for name, value in unread(example, named) if str(value) not in BLANK)
        completion = example.get("completion")
        messages = as_messages(example["prompt"]) + (completion if isinstance(completion, list) else [])
        for number, message in enumerate(messages):
            kind = (message["role"], *message)            # each kind is tried once
            if len(message) > 2 and kind not in unwritten_of:
                unwritten = {*unwritten_entries(tokenizer, messages, number)}
                unwritten_of[kind] = unwritten - {"role", "content"}
            unused.update(f"key {name} of {kind[0]} messages" for name in unwritten_of.get(kind, ()))
    if "tools" in unused:
        example = next(e for e in examples if str(e.get("tools")) not in BLANK)
        without = encode_prompt(tokenizer, example["prompt"])
        unused["tools"] *= encode_prompt(tokenizer, example) == without
    if unused := +unused:
        names = ", ".join(f"{name} ({count})" for name, count in unused.most_common())
        notify(f"  note   no prompt, completion or reward function uses these columns and keys: {names}")


def unread(example: dict, named: set[str]) -> list[tuple]:
    """Return the columns and values of an example that were not read and are not named."""
    known = named.union(getattr(example, "read", example))
    return [(name, value) for name, value in example.items() if name not in known]


def fit_prompts(
    examples: list[dict], tokenizer, config: Config, notify: Callable
) -> tuple[list[dict], int]:
    """Raise ValueError for prompts longer than --max_prompt_length, or drop them, as --long_prompts says.

    returns  the examples with --instruction, and the length of the longest prompt in tokens
    """
    limit = config.data.max_prompt_length
    examples = [instructed(example, config.data.instruction) for example in examples]
    lengths = [len(encode_prompt(tokenizer, example)) for example in examples]
    rendered = [e["prompt"] for e in examples if tokenizer.chat_template or not isinstance(e["prompt"], str)]
    if cleaned := sum(without_special_tokens(tokenizer, m) != m for m in map(as_messages, rendered)):
        notify(f"{cleaned} of {len(examples)} prompts have the text of special tokens, which is removed")
    too_long = [i for i, length in enumerate(lengths) if length > limit]
    if too_long and config.data.long_prompts == "error":
        raise ValueError(
            f"--max_prompt_length={limit}: {len(too_long)} of {len(examples)} prompts are longer, such as "
            f"{examples[too_long[0]]['prompt']!r:.40} with {lengths[too_long[0]]} tokens; raise it to "
            f"{max(lengths)}, or pass --long_prompts drop")
    if too_long:
        notify(f"{len(too_long)} of {len(examples)} prompts have more than {limit} tokens and are dropped")
    kept = [(example, n) for example, n in zip(examples, lengths, strict=True) if n <= limit]
    if examples and not kept:
        raise ValueError(f"--max_prompt_length={limit} --long_prompts drop: no prompt is left")
    return [example for example, _ in kept], max((n for _, n in kept), default=0)


def validate_demonstrations(config: Config, dataset: Sequence[dict]) -> None:
    """Raise ValueError if supervised steps are planned and examples have no demonstration."""
    training = config.training
    if training.use_grpo and not training.cold_start_steps:
        return
    without = sum(not example.get("completion") for example in dataset)
    if without:
        raise ValueError(
            f"--dataset={config.data.dataset}: no completion for {without} of {len(dataset)} examples, which "
            "supervised steps need; name a --completion_column, use conversations (--prompt_column "
            "messages), or pass --use_grpo --cold_start_steps 0 to train on rewards only")


def refuse_long_demonstrations(
    config: Config, dataset: Sequence[dict], tokenizer, stop_ids: list[int], positions: int | None
) -> None:
    """Raise ValueError if a prompt with its demonstration has more tokens than the model has positions."""
    if config.training.use_grpo and not config.training.cold_start_steps:
        return
    for number, example in enumerate(dataset, start=1):
        ids, _ = encode_turns(tokenizer, example["prompt"], example["completion"], stop_ids)
        length = len(encode_prompt(tokenizer, example)) + len(ids)
        if positions and length > positions:
            raise ValueError(
                f"--dataset={config.data.dataset}: example {number} and its completion have {length} tokens, "
                f"but the model has {positions} positions; remove or shorten it")


def prompt_key(prompt) -> str:
    """Return a key that ignores white space, case, and whether a prompt is text or a user message."""
    return " ".join(as_text(as_messages(prompt)).casefold().split())
