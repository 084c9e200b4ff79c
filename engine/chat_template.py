"""
Rendering chat messages as text, and an environment's messages as tokens: with the tokenizer's chat template,
or as lines if it has none.

Only the template makes special tokens: where a message that is not the assistant's contains the text of one,
it is encoded as ordinary text. Prompts and demonstrations are encoded in data.py.
"""

import re
from functools import lru_cache

MARK = "\ufdd0"                 # around the text of a special token; Unicode has no character here


def encode_reply(tokenizer, prompt, message: dict, stop_ids: list[int]) -> list[int]:
    """Encode an environment's message: token ids between the stop token of a turn and the next turn.

    prompt  the first prompt of the conversation: without a chat template, the reply to text is lines of text,
            and the reply to messages is lines that begin with a role

    The message is rendered after a made-up turn, since templates may render earlier turns differently later
    (Qwen 3 leaves out their reasoning), but sampled tokens must not change.
    """
    message = with_known_role(tokenizer, message)
    if not tokenizer.chat_template:
        (content,) = (m["content"] for m in mark_special_tokens(tokenizer, [message]))
        is_text = isinstance(prompt, str) or is_ids(prompt)
        return encode(
            tokenizer, f"\n{content}\n" if is_text else f"\n{message['role']}: {content}\nassistant: ")
    end, ids = (encode(tokenizer, text) for text in (after_turn(tokenizer), after_turn(tokenizer, message)))
    stop = next((i for i, token in enumerate(end) if token in stop_ids), -1)  # the turn already ends with one
    return ids[stop + 1 :] if ids[: stop + 1] == end[: stop + 1] else ids


def after_turn(tokenizer, *messages: dict) -> str:
    """Render messages after a made-up turn of the assistant; with any, also the start of the next turn."""
    before = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "madeupturn"}]
    text = render(tokenizer, [*before, *messages], add_generation_prompt=bool(messages))
    return text.partition("madeupturn")[2]


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


def render(tokenizer, messages: list[dict], add_generation_prompt: bool) -> str:
    """Render a conversation as text, with the tools in tokenizer.tools and --chat_template_kwargs, if any.

    returns  text for encode: with MARK around special tokens that are not the template's
    raises   ValueError for messages that the template rejects, such as a system message in Gemma 2's
    """
    try:
        text = tokenizer.apply_chat_template(
            mark_special_tokens(tokenizer, messages), tools=getattr(tokenizer, "tools", None),
            add_generation_prompt=add_generation_prompt, tokenize=False,
            **tokenizer.init_kwargs.get("chat_template_kwargs", {}),
        )
        text.encode()                                     # half of a surrogate pair cannot be tokenised
        return text
    except Exception as error:                            # a template may do anything
        raise ValueError(f"the chat template refuses the prompt {messages!r:.80}...: {error}") from None


def mark_special_tokens(tokenizer, messages: list[dict]) -> list[dict]:
    """Put MARK around the text of special tokens in messages that are not the assistant's."""
    pattern = special_tokens(tokenizer, len(tokenizer), *tokenizer.all_special_tokens)
    return [
        message | {"content": pattern.sub(f"{MARK}\\g<0>{MARK}", message["content"].replace(MARK, ""))}
        if isinstance(message["content"], str) and message["role"] != "assistant" else message
        for message in messages
    ]


@lru_cache(maxsize=8)
def special_tokens(tokenizer, size: int, *known: str) -> re.Pattern:
    """Return a pattern of the texts of all special tokens. size, known: of this state of the tokenizer."""
    texts = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special} | {*known}
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


def encode(tokenizer, text: str, add_special_tokens: bool = False) -> list[int]:
    """Encode text; between two MARKs it is ordinary text. add_special_tokens: the tokenizer's, as BOS."""
    first, *pieces = text.split(MARK)
    ids = tokenizer(first, add_special_tokens=add_special_tokens).input_ids
    for number, piece in enumerate(pieces):
        ids += tokenizer(piece, add_special_tokens=False, split_special_tokens=number % 2 == 0).input_ids
    return ids


def as_messages(prompt) -> list[dict]:
    """Convert a prompt to chat messages: text has the role of the user, with no content for token ids."""
    text = "" if is_ids(prompt) else prompt
    return [{"role": "user", "content": text}] if isinstance(text, str) else list(text)


def as_text(messages: str | list[dict]) -> str:
    """Convert a prompt to text for people: one line per message; a truncated prompt gives its token ids."""
    if isinstance(messages, str) or isinstance(messages[0], int):
        return str(messages)
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


def is_ids(prompt) -> bool:
    """Return True if a prompt is a list of token ids."""
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)
