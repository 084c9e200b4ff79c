"""Encode messages of a conversation: demonstrations with several turns, and an environment's messages."""

from contextlib import suppress
from functools import partial

from data import after_turn, as_messages, encode_completion, encode_demonstration, render
from guards import OUTPUT, without_special_tokens


def encode_turns(
    tokenizer, prompt, completion: str | list[dict], stop_ids: list[int]
) -> tuple[list[int], list[bool]]:
    """Encode a demonstration, text or messages. Returns token ids and a mask, True on the assistant's."""
    if isinstance(completion, str):
        return encode_demonstration(tokenizer, prompt, completion, stop_ids)
    ids, is_assistant, messages = [], [], without_special_tokens(tokenizer, as_messages(prompt))
    for message in completion:
        own = message["role"] == "assistant"
        part = (
            encode_completion(tokenizer, text_of_turn(tokenizer, messages, message), stop_ids) if own
            else encode_reply(tokenizer, prompt, message, stop_ids, ended_by=ids[-1]))
        if not own and part[0] in stop_ids and not after_turn(tokenizer):        # of GLM 4, in place of EOS
            ids[-1] = part.pop(0)
        ids += part
        is_assistant += [own] * len(part)
        messages = [*messages, message]
    return ids, is_assistant


def text_of_turn(tokenizer, before: list[dict], message: dict) -> str:
    """Return the text of an assistant's turn: its content or, with tool calls, as the template renders it.

    Raises ValueError if the template does not render all of the turn after the earlier messages.
    """
    if not any(map(message.get, OUTPUT)):
        return message["content"]
    opened, whole = render(tokenizer, before, True), render(tokenizer, [*before, message], False)
    unwritten = unwritten_entries(tokenizer, [*before, message], len(before))
    lost = [name for name in (*OUTPUT, "content") if message.get(name) and name in unwritten]
    if lost or not whole.startswith(opened):
        raise ValueError(
            f"the chat template does not write {', '.join(lost) or 'it'} of the assistant's message "
            f"{message!r:.120} behind the prompt; write it as content, or pass another --chat_template")
    return whole[len(opened) :].removesuffix(after_turn(tokenizer))


def unwritten_entries(tokenizer, messages: list[dict], number: int) -> list[str]:
    """Return the entries of a message that the template does not render: without them the text is equal."""
    message, texts = messages[number], {}
    for name in ["", *message]:
        other = {entry: value for entry, value in message.items() if entry != name}
        if isinstance(message.get(name), list):
            other[name] = message[name][:-1]
        with suppress(ValueError):                        # a template may need an entry
            texts[name] = render(tokenizer, [*messages[:number], other, *messages[number + 1 :]], False)
    return [name for name in message if texts.get(name) == texts.get("")]


def encode_reply(
    tokenizer, prompt, message: dict, stop_ids: list[int], ended_by: int | None = None
) -> list[int]:
    """Encode an environment's message: the token ids between the stop token of a turn and the next turn.

    prompt    the first prompt of the conversation: without a chat template, the reply to text is lines of
              text, and the reply to messages is lines that begin with a role
    ended_by  the stop token of the turn: a template without one begins the reply with it (GLM 4)

    The message is rendered after a made-up turn. Templates may render earlier turns differently later (Qwen 3
    omits their reasoning), but sampled tokens must not change.
    """
    (message,) = without_special_tokens(tokenizer, [with_known_role(tokenizer, message)])
    encode = partial(tokenizer.encode, add_special_tokens=False)
    if not tokenizer.chat_template:
        content = message["content"]
        return encode(
            f"\n{content}\n" if isinstance(prompt, str) else f"\n{message['role']}: {content}\nassistant: ")
    end, ids = encode(after_turn(tokenizer)), encode(after_turn(tokenizer, message))
    stop = next((i for i, token in enumerate(end) if token in stop_ids), -1)  # the turn already ends with one
    if stop < 0 and ids[:1] == [ended_by]:
        return ids[1:]
    return ids[stop + 1 :] if ids[: stop + 1] == end[: stop + 1] else ids


def with_known_role(tokenizer, message: dict) -> dict:
    """Return the message, with the role of the user if the template rejects or omits its own role.

    The check uses made-up content, so that the result is the same for all messages of a tool.
    """
    if message["role"] in ("user", "assistant") or not tokenizer.chat_template:
        return message
    with suppress(ValueError):
        if "madeupreply" in after_turn(tokenizer, message | {"content": "madeupreply"}):
            return message
    return message | {"role": "user"}
