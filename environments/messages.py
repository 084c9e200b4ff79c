"""Encode demonstrations with several turns, and an environment's messages."""

from contextlib import suppress
from functools import partial

from data import after_turn, as_messages, encode_completion, render


def encode_turns(tokenizer, prompt, completion, stop_ids: list[int]) -> tuple[list[int], list[bool]]:
    """Encode a demonstration, text or messages. Returns token ids and a mask, True on the assistant's."""
    turns = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    ids, mask, before = [], [], as_messages(prompt)
    for number, message in enumerate(turns):
        if own := message["role"] == "assistant":
            text = text_of_turn(tokenizer, before + turns[:number], message)
            part = encode_completion(tokenizer, prompt, text, stop_ids)
        else:
            part = encode_reply(tokenizer, prompt, message, stop_ids, ids[-1])
        ids, mask = ids + part, mask + [own] * len(part)
    return ids, mask


def text_of_turn(tokenizer, before: list[dict], message: dict) -> str:
    """Return an assistant's content or, with tool calls, its turn as the template renders it in whole."""
    names = [name for name, value in message.items() if name != "role" and value]
    if names == ["content"]:
        return message["content"]
    opened, whole = render(tokenizer, before), render(tokenizer, [*before, message], False)
    without = [render(tokenizer, [*before, message | {name: None}], False) for name in names]
    if not whole.startswith(opened) or whole in without:
        raise ValueError(f"the chat template does not write all of {message!r:.120}; make it content")
    return whole[len(opened) :].removesuffix(after_turn(tokenizer))


def encode_reply(tokenizer, prompt, message, stop_ids: list[int], ended_by: int | None = None) -> list[int]:
    """Encode an environment's message, as rendered after a made-up turn, up to the next turn of the policy.

    A role that the template does not render becomes the user's. GLM 4 begins a reply with ended_by.
    """
    encode, role = partial(tokenizer.encode, add_special_tokens=False), "user"
    if not tokenizer.chat_template:
        text = f"{message['content']}\n" if isinstance(prompt, str) else render(tokenizer, [message])
        return encode(f"\n{text}")
    with suppress(ValueError):
        if "madeupreply" in after_turn(tokenizer, message | {"content": "madeupreply"}):
            role = message["role"]
    end = encode(after_turn(tokenizer)) or [ended_by]
    ids = encode(after_turn(tokenizer, message | {"role": role}))
    stop = next((i for i, token in enumerate(end) if token in stop_ids), -1)
    return ids[stop + 1 :] if ids[: stop + 1] == end[: stop + 1] else ids
