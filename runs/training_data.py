"""
The training and held-out examples of a run, and prompts that are too long.
"""

import random
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from config import Config
from data import encode_prompt, load_examples, prompt_key, with_instruction
from sources.readers import READERS, View


def load_data(config: Config) -> tuple[Sequence[dict], list[dict]]:
    """Return (training examples, held-out examples). Prompts that are held out, or differ from such prompts only in white
    space or case, are removed from the training examples.
    """
    data_config = config.data
    options = dict(seed=config.training.seed, bad_lines=data_config.bad_lines, columns=data_config.columns)
    train = load_examples(data_config.dataset, "train", limit=data_config.limit or None, **options)
    chosen = range(len(train))
    if data_config.eval_limit == 0:
        held_out = []
    elif data_config.eval_dataset:
        held_out = load_examples(data_config.eval_dataset, "test", limit=data_config.eval_limit, **options)
    elif Path(data_config.dataset).suffix in READERS:                                   # one file: set some of it aside
        order = random.Random(config.training.seed).sample(chosen, len(train))
        count = min(data_config.eval_limit, len(train) // 5)
        chosen, held_out = order[count:], [train[i] for i in order[:count]]
    else:
        held_out = load_examples(data_config.dataset, "test", limit=data_config.eval_limit, **options)
    held_out_prompts = {prompt_key(example["prompt"]) for example in held_out}
    overlap = {i for i, example in enumerate(train) if prompt_key(example["prompt"]) in held_out_prompts}
    chosen = array("q", (i for i in chosen if i not in overlap))
    if not chosen:
        raise ValueError(f"--dataset={data_config.dataset}: all its prompts are held out; choose another --eval_dataset")
    instruct = partial(with_instruction, instruction=data_config.instruction)
    return View(train, chosen, instruct), [instruct(example) for example in held_out]


def fit_prompts(examples: Sequence[dict], tokenizer, config: Config, notify: Callable) -> tuple[Sequence[dict], int]:
    """Reject, cut or drop prompts longer than --max_prompt_length, as --long_prompts says, and print how many there are.

    returns  the examples, and the length of the longest prompt in tokens
    """
    data_config, limit = config.data, config.data.max_prompt_length
    lengths = array("q", (len(encode_prompt(tokenizer, example["prompt"])) for example in examples))
    too_long = [i for i, length in enumerate(lengths) if length > limit]
    if not too_long:
        return examples, max(lengths, default=0)
    if data_config.long_prompts == "error":
        raise ValueError(
            f"--max_prompt_length={limit}: {len(too_long)} of {len(examples)} prompts are longer, such as "
            f"{examples[too_long[0]]['prompt']!r:.40} with {lengths[too_long[0]]} tokens; raise it to {max(lengths)}, or pass "
            "--long_prompts truncate or drop"
        )
    notify(f"{len(too_long)} of {len(examples)} prompts have more than {limit} tokens: {data_config.long_prompts}")
    if data_config.long_prompts == "truncate":
        return View(examples, range(len(examples)), partial(truncated, tokenizer=tokenizer, limit=limit)), limit
    kept = array("q", (i for i, length in enumerate(lengths) if length <= limit))
    if not kept:
        raise ValueError(f"--max_prompt_length={limit} --long_prompts drop: no prompt is left")
    return View(examples, kept, dict), max(lengths[i] for i in kept)


def truncated(example: dict, tokenizer, limit: int) -> dict:
    """Return the example; a longer prompt is replaced by the ids of its BOS, if it has one, and its last tokens."""
    ids = encode_prompt(tokenizer, example["prompt"])
    if len(ids) <= limit:
        return example
    begin = ids[:1] if ids[0] == tokenizer.bos_token_id else []
    return example | {"prompt": begin + ids[len(ids) - limit + len(begin) :]}


def validate_demonstrations(config: Config, dataset: Sequence[dict]) -> None:
    """Raise ValueError if supervised steps are planned and examples have no demonstration."""
    training = config.training
    without = sum(not e.get("completion") for e in dataset) if training.cold_start_steps or not training.use_grpo else 0
    if without:
        wish = f"--cold_start_steps={training.cold_start_steps}" if training.use_grpo else "supervised training (no --use_grpo)"
        instead = "--cold_start_steps 0" if training.use_grpo else "--use_grpo --cold_start_steps 0"
        raise ValueError(
            f"{wish} needs demonstrations, but {config.data.dataset} has no completion for {without} of {len(dataset)} "
            f"examples; name a --completion_column, or pass {instead} to learn from rewards alone"
        )
