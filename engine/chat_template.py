"""
Chat messages as text, and an environment's messages as tokens: with the chat template of the tokenizer, or in lines.

Prompts and demonstrations are encoded in data.py.
"""

from jinja2 import TemplateError


def encode_reply(tokenizer, prompt, message: dict, stop_ids: list[int]) -> list[int]:
    """Token ids of what an environment says: from behind the stop token of a turn to where the next turn begins.

    prompt  what the conversation began with: without a chat template, text is answered by lines of text, and messages by
            lines that begin with a role
    Rendered behind a turn that is made up, with and without the message: templates may show earlier turns in another way
    later on (Qwen 3 leaves out their thoughts), but what has been sampled stays. A tool's message that the template refuses or
    leaves out is said by the user.
    """
    if not tokenizer.chat_template:
        said = message["content"]
        in_lines = isinstance(prompt, str) or is_ids(prompt)
        text = f"\n{said}\n" if in_lines else f"\n{message['role']}: {said}\nassistant: "
        return tokenizer(text, add_special_tokens=False).input_ids

    def after_turn(*messages):
        before = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "madeupturn"}]
        return render(tokenizer, [*before, *messages], add_generation_prompt=bool(messages)).partition("madeupturn")[2]

    try:
        text = after_turn(message)
    except ValueError:
        text = ""
    if message["content"].strip() not in text or not text:
        text = after_turn(message | {"role": "user"})
    end, ids = (tokenizer(part, add_special_tokens=False).input_ids for part in (after_turn(), text))
    stop = next((i for i, token in enumerate(end) if token in stop_ids), -1)     # the turn has ended with such a token already
    return ids[stop + 1 :] if ids[: stop + 1] == end[: stop + 1] else ids


def render(tokenizer, messages: list[dict], add_generation_prompt: bool) -> str:
    """A conversation as text. Templates refuse what they do not know, such as Gemma 2's a system message.

    The model is told about tools, in the form of its template, if tokenizer.tools has any.
    """
    try:
        return tokenizer.apply_chat_template(
            messages, tools=getattr(tokenizer, "tools", None), add_generation_prompt=add_generation_prompt, tokenize=False
        )
    except TemplateError as error:
        raise ValueError(f"the chat template refuses the prompt {messages!r:.80}...: {error}") from None


def as_messages(prompt) -> list[dict]:
    """A prompt as chat messages: text is what a user says. One that was cut, and is kept as token ids, has nothing to show."""
    text = "" if is_ids(prompt) else prompt
    return [{"role": "user", "content": text}] if isinstance(text, str) else list(text)


def as_text(messages: str | list[dict]) -> str:
    """What people read: text as it is, of messages a line for each; of a prompt that was cut its token ids."""
    if isinstance(messages, str) or isinstance(messages[0], int):
        return str(messages)
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


def is_ids(prompt) -> bool:
    """Whether a prompt is token ids."""
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)
