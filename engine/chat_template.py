"""
Rendering chat messages as text, and an environment's messages as tokens: with the tokenizer's chat template,
or as lines if it has none.

Prompts and demonstrations are encoded in data.py.
"""

from jinja2 import TemplateError


def encode_reply(tokenizer, prompt, message: dict, stop_ids: list[int]) -> list[int]:
    """Encode an environment's message: token ids between the stop token of a turn and the next turn.

    prompt  the first prompt of the conversation: without a chat template, the reply to text is lines of text,
            and the reply to messages is lines that begin with a role

    The message is rendered after a made-up turn, since templates may render earlier turns differently later
    (Qwen 3 leaves out their reasoning), but sampled tokens must not change. A tool's message that the
    template rejects or leaves out gets the role of the user.
    """
    if not tokenizer.chat_template:
        content = message["content"]
        is_text = isinstance(prompt, str) or is_ids(prompt)
        text = f"\n{content}\n" if is_text else f"\n{message['role']}: {content}\nassistant: "
        return tokenizer(text, add_special_tokens=False).input_ids

    def after_turn(*messages):
        before = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "madeupturn"}]
        text = render(tokenizer, [*before, *messages], add_generation_prompt=bool(messages))
        return text.partition("madeupturn")[2]

    try:
        text = after_turn(message)
    except ValueError:
        text = ""
    if message["content"].strip() not in text or not text:
        text = after_turn(message | {"role": "user"})
    end, ids = (tokenizer(x, add_special_tokens=False).input_ids for x in (after_turn(), text))
    stop = next((i for i, token in enumerate(end) if token in stop_ids), -1)  # the turn already ends with one
    return ids[stop + 1 :] if ids[: stop + 1] == end[: stop + 1] else ids


def render(tokenizer, messages: list[dict], add_generation_prompt: bool) -> str:
    """Render a conversation as text, with the tools in tokenizer.tools and --chat_template_kwargs, if any.

    raises  ValueError for messages that the template rejects, such as a system message in Gemma 2's
    """
    try:
        return tokenizer.apply_chat_template(
            messages, tools=getattr(tokenizer, "tools", None), add_generation_prompt=add_generation_prompt,
            tokenize=False, **tokenizer.init_kwargs.get("chat_template_kwargs", {}),
        )
    except TemplateError as error:
        raise ValueError(f"the chat template refuses the prompt {messages!r:.80}...: {error}") from None


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
