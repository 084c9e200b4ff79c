"""Messages of a conversation as token ids: demonstrations with several turns, an environment's messages."""

from functools import partial

from data import after_turn, encode_completion, encode_demonstration
from guards import without_special_tokens


def encode_turns(
    tokenizer, prompt, completion: str | list[dict], stop_ids: list[int]
) -> tuple[list[int], list[bool]]:
    """Encode a demonstration, text or messages: token ids, and True where they are the assistant's."""
    if isinstance(completion, str):
        return encode_demonstration(tokenizer, prompt, completion, stop_ids)
    ids, is_assistant = [], []
    for message in completion:
        own = message["role"] == "assistant"
        part = (
            encode_completion(tokenizer, message["content"], stop_ids) if own
            else encode_reply(tokenizer, prompt, message, stop_ids))
        ids += part
        is_assistant += [own] * len(part)
    return ids, is_assistant


def encode_reply(tokenizer, prompt, message: dict, stop_ids: list[int]) -> list[int]:
    """Encode an environment's message: token ids between the stop token of a turn and the next turn.

    prompt  the first prompt of the conversation: without a chat template, the reply to text is lines of text,
            and the reply to messages is lines that begin with a role

    The message is rendered after a made-up turn, since templates may render earlier turns differently later
    (Qwen 3 leaves out their reasoning), but sampled tokens must not change.
    """
    (message,) = without_special_tokens(tokenizer, [with_known_role(tokenizer, message)])
    encode = partial(tokenizer.encode, add_special_tokens=False)
    if not tokenizer.chat_template:
        content = message["content"]
        return encode(
            f"\n{content}\n" if isinstance(prompt, str) else f"\n{message['role']}: {content}\nassistant: ")
    end, ids = encode(after_turn(tokenizer)), encode(after_turn(tokenizer, message))
    stop = next((i for i, token in enumerate(end) if token in stop_ids), -1)  # the turn already ends with one
    return ids[stop + 1 :] if ids[: stop + 1] == end[: stop + 1] else ids


def with_known_role(tokenizer, message: dict) -> dict:
    """Return the message; with the role of the user if the template rejects or leaves out its own role.

    This is found with a made-up content: the same for each message of a tool.
    """
    if message["role"] in ("user", "assistant") or not tokenizer.chat_template:
        return message
    try:
        known = "madeupreply" in after_turn(tokenizer, message | {"content": "madeupreply"})
    except ValueError:
        known = False
    return message if known else message | {"role": "user"}
