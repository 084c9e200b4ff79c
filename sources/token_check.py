"""
Checks of all prompts and demonstrations before training: token ids are compared with their text, which finds
what a tokenizer or a chat template loses, adds or cuts.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager

from data import as_map, as_messages, encode_prompt, render
from environments.messages import encode_turns
from sample import stop_token_ids


@contextmanager
def naming(source: str, example: dict):
    """Put the source and the number of an example, or the beginning of its prompt, before a ValueError."""
    try:
        yield
    except ValueError as error:
        number = getattr(example, "number", 0)
        name = f"example {number}" if number else f"the example {example['prompt']!r:.40}"
        raise ValueError(f"{source}: {name}: {error}") from None


def encode_prompts(examples: Sequence[dict], tokenizer, source: str) -> list[list[int]]:
    """Encode prompts. Raises ValueError that names the row if the ids are not what its text says."""
    encoded, special = [], special_tokens(tokenizer)
    for example in examples:
        prompt, tools = example["prompt"], example.get("tools")
        with naming(source, example):
            ids = encode_prompt(tokenizer, example)
            if tokenizer.chat_template or not isinstance(prompt, str):
                said = [m["content"] for m in as_messages(prompt) if m["role"] != "assistant"]
                refuse_special_tokens("prompt", f"{said} {tools}", special)
            refuse_lost_characters(tokenizer, "prompt", render(tokenizer, prompt, tools=tools), ids)
            if ids[:2] == [tokenizer.bos_token_id] * 2:
                raise ValueError(
                    f"the prompt begins with two {tokenizer.bos_token}: remove the one in the data or the "
                    "chat template, or set add_bos_token to false in tokenizer_config.json")
        encoded.append(ids)
    return encoded


def refuse_special_tokens(name: str, text: str, special: list[str]) -> None:
    """Raise ValueError if a text has the text of a special token, which might end or begin a turn."""
    if found := next((token for token in special if token in text), None):
        fix = as_map(name, f"row['{name}'].replace('{found}', '')")
        raise ValueError(f"the {name} has the text of the special token {found}: {fix}")


def refuse_lost_characters(tokenizer, name: str, text: str, ids: list[int]) -> None:
    """Raise ValueError if ids lack characters of a text, apart from white space and forms of a character."""
    decoded = tokenizer.decode(ids)
    if text in decoded:
        return
    given, kept = (unicodedata.normalize("NFKC", each).casefold() for each in (text, decoded))
    if lost := "".join(Counter(c for c in given if c.isprintable() and c != " ") - Counter(kept)):
        fix = as_map(name, f"row['{name}'].replace({lost[0]!r}, '...')")
        raise ValueError(f"the tokenizer loses {lost!r:.40} of the {name}: {fix}, or data.filter")


def refuse_wrong_ids(model, tokenizer, prompts: Sequence[list[int]]) -> None:
    """Raise ValueError if a stop or pad token is ordinary text, or if a prompt ends with a stop token."""
    stops, rows = stop_token_ids(model, tokenizer), model.get_input_embeddings().weight.shape[0]
    if not stops:
        raise ValueError("--model_path: there is no stop id; set eos_token_id in its generation_config.json")
    for name, ids in ("eos_token_id", stops), ("pad_token_id", [tokenizer.pad_token_id]):
        texts = [tokenizer.convert_ids_to_tokens(token) or "<unused>" for token in ids]
        if ordinary := [text for text in texts if not re.search(r"<.+>|\[.+\]", text)]:
            raise ValueError(
                f"--model_path: {name} {ids} is ordinary text, {ordinary[0]!r}; set it to a special token in "
                "generation_config.json, and its text in tokenizer_config.json")
    if any(ids[-1] in stops for ids in prompts):
        raise ValueError(
            "--model_path: a prompt ends with a stop id, so there is nothing to continue; set add_eos_token "
            "to false in tokenizer_config.json")
    if (largest := max(map(max, prompts), default=0)) >= rows:
        raise ValueError(
            f"--model_path: the tokenizer makes the id {largest}, but the model has {rows} embeddings; take "
            "the model's own tokenizer, or call resize_token_embeddings")


def encode_demonstrations(
    examples: Sequence[dict], prompts: Sequence[list[int]], model, tokenizer, source: str
) -> list[list[int]]:
    """Encode demonstrations. Raises ValueError that names the row, as encode_prompts."""
    stops, encoded = stop_token_ids(model, tokenizer), []
    stop_texts = tokenizer.convert_ids_to_tokens(stops)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for example, prompt in zip(examples, prompts, strict=True):
        completion = example["completion"]
        with naming(source, example):
            ids, _ = encode_turns(tokenizer, example["prompt"], completion, stops)
            for message in as_messages(completion):
                refuse_special_tokens("completion", message["content"] or "", stop_texts)
                refuse_lost_characters(tokenizer, "completion", message["content"] or "", ids)
            if positions and (length := len(prompt) + len(ids)) > positions:
                raise ValueError(
                    f"prompt and completion have {length} tokens, but the model has {positions} positions; "
                    "shorten it, or remove the row with data.filter")
        encoded.append(ids)
    return encoded


def special_tokens(tokenizer) -> list[str]:
    """Return the texts of all special tokens."""
    texts = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return sorted({*texts, *tokenizer.all_special_tokens} - {""}, key=len, reverse=True)


def without_special_tokens(tokenizer, text: str) -> str:
    """Return a text without the text of special tokens, which would end or begin a turn."""
    special = special_tokens(tokenizer)
    while found := next((token for token in special if token in text), None):
        text = text.replace(found, "")                    # <|im_<|im_end|>end|> leaves another
    return text
