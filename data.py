"""
Where prompts come from: built-in problems, files and hubs; how they become tokens; and the order they are used in.

An example is a dict with "prompt" (a string, or a list of chat messages) and, where known, "answer" (for rewards) and
"completion" (a demonstration, for supervised training; text, or the messages of a
conversation). Other columns are passed on to the reward functions.

Left out on purpose: streaming. A data set is a list in memory, or a memory-mapped file that `datasets` reads.
"""

import json
import random
import re
import warnings
from pathlib import Path

from jinja2 import TemplateError  # transformers renders chat templates with it

READERS = {".jsonl": "", ".json": "", ".csv": "csv", ".parquet": "parquet"}        # who of `datasets` reads it, if not we
PROMPT_COLUMNS = ("prompt", "question", "problem", "instruction", "messages")
ANSWER_COLUMNS = ("answer", "solution", "target")
COMPLETION_COLUMNS = ("completion", "response", "output")


def load_examples(
    source: str, split: str = "train", *, limit: int | None = None, seed: int = 0, bad_lines: str = "error"
) -> list[dict]:
    """Read examples: built-in ones, a .jsonl, .json, .csv or .parquet file, or the Hugging Face hub.

    source     "arithmetic" or "guess_letter"; a path; or a hub id such as "openai/gsm8k:main" (configuration after the colon)
    split      "train" or "test"; a file is one split, whatever this says
    limit      at most so many examples, from the start
    seed       the order of the built-in problems; which of them are test problems never changes
    bad_lines  a line of a .jsonl file that is not JSON: "error", or "skip" with a warning that counts them
    raises     ValueError, one line that names the file and, where there is one, the line
    """
    if source in BUILT_IN:
        return BUILT_IN[source](split, seed)[:limit]
    is_file = Path(source).suffix in READERS
    rows = read_file(Path(source), bad_lines) if is_file else read_hub(source, split)
    if len(rows) == 0:
        raise ValueError(f"{source}: no examples in it")
    rows = rows[:limit] if isinstance(rows, list) else list(rows.select(range(min(limit or len(rows), len(rows)))))
    return [as_example(row, f"{source}: example {number}") for number, row in enumerate(rows, start=1)]


def arithmetic(split: str, seed: int) -> list[dict]:
    """Sums of two numbers below 100: 9000 problems to train on, 1000 others to test on."""
    problems = [(a, b) for a in range(100) for b in range(100)]
    random.Random("which problems are held out").shuffle(problems)
    problems = problems[1000:] if split == "train" else problems[:1000]
    random.Random(seed).shuffle(problems)
    return [
        {"prompt": f"{a}+{b}=?", "answer": str(a + b), "completion": demonstration(column_sums(a, b), str(a + b))}
        for a, b in problems
    ]


def column_sums(a: int, b: int) -> str:
    """Addition as it is done on paper: 47+85 is "7+5=12 4+8=12 12+1=13", from which 132 can be read off."""
    ones, tens = a % 10 + b % 10, a // 10 + b // 10
    carry = f" {tens}+1={tens + 1}" if ones > 9 else ""
    return f"{a % 10}+{b % 10}={ones} {a // 10}+{b // 10}={tens}{carry}"


def demonstration(reasoning: str, answer: str) -> str:
    """The form that the format rewards look for."""
    return f"<reasoning>{reasoning}</reasoning><answer>{answer}</answer>"


def guess_letter(split: str, seed: int) -> list[dict]:
    """Letters to be found between two others, 8 to 16 in question: games in 108 ranges to train on, in 27 others to test on.

    The demonstrations guess at random among what is still possible, in as many turns as it takes.
    """
    letters = "abcdefghijklmnopqrstuvwxyz"
    ranges = [letters[low : low + size] for size in range(8, 17) for low in range(len(letters) - size + 1)]
    random.Random("which ranges are held out").shuffle(ranges)
    games = [(possible, letter) for possible in (ranges[27:] if split == "train" else ranges[:27]) for letter in possible]
    random.Random(seed).shuffle(games)
    return [
        {"prompt": f"{possible[0]}-{possible[-1]}?", "answer": letter, "completion": guesses(possible, letter)}
        for possible, letter in games
    ]


def guesses(possible: str, letter: str) -> list[dict]:
    """A game of guess_letter, as the policy's and the environment's messages."""
    chance, messages, guess = random.Random(f"{possible} {letter}"), [], ""
    while guess != letter:
        guess = chance.choice(possible)
        messages.append({"role": "assistant", "content": f"<answer>{guess}</answer>"})
        if guess != letter:
            messages.append({"role": "user", "content": "up" if letter > guess else "down"})
        possible = "".join(other for other in possible if (other > guess) == (letter > guess) and other != guess)
    return messages


BUILT_IN = {"arithmetic": arithmetic, "guess_letter": guess_letter}


# ---- files and hubs ------------------------------------------------------------------------------------------------


def read_file(path: Path, bad_lines: str):
    """Rows of a data file, as a list or a datasets.Dataset."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: the file is empty")
    if path.suffix == ".json":
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: not JSON: {error}") from None
        if isinstance(content, dict):                                            # {"prompts": [...]}
            content = content.get("prompts")
        if not isinstance(content, list):
            raise ValueError(f'{path}: must hold a list of examples, or {{"prompts": [...]}}')
        return [row if isinstance(row, dict) else {"prompt": row} for row in content]

    if path.suffix == ".jsonl":
        return read_lines(path, bad_lines)
    import datasets  # slow to import, and not needed for the built-in problems

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)                    # what goes wrong is said here, in one line
    try:
        return datasets.load_dataset(READERS[path.suffix], data_files=str(path), split="train")
    except Exception as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise ValueError(f"{path}: cannot be read as {path.suffix[1:]}: {reason}") from None


def read_lines(path: Path, bad_lines: str) -> list[dict]:
    """The objects of a .jsonl file. `datasets` would not say which line is to blame, and turns "2020-01-01" into a date."""
    rows, bad = [], []
    for number, line in enumerate(path.open(encoding="utf-8", errors="replace"), start=1):
        if not line.strip():
            continue
        try:
            row, problem = json.loads(line), 'not an object such as {"prompt": "...", "answer": "..."}'
        except ValueError as error:
            row, problem = None, f"not JSON: {error}"
        if isinstance(row, dict):
            rows.append(row)
            continue
        if bad_lines == "error":
            raise ValueError(f"{path}: line {number} is {problem}; mend it, or pass --bad_lines skip")
        bad.append(number)
    if bad:
        total = len(rows) + len(bad)
        warnings.warn(f"{path}: left out {len(bad)} of {total} lines that are not JSON objects: {bad[:5]}", stacklevel=2)
    return rows


def read_hub(source: str, split: str):
    """One split of a data set on the hub, or of a folder that `datasets` understands."""
    name, _, configuration = source.partition(":")
    kinds = f"not built in ({', '.join(BUILT_IN)}) and not a file ending in {', '.join(READERS)}"
    if "/" not in name:
        raise ValueError(f"{source}: {kinds}; ids on the hub look like openai/gsm8k")
    import datasets  # slow to import

    try:
        return datasets.load_dataset(name, configuration or None, split=split)
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{source}: {kinds}, and the hub answers: {reason}") from None


def as_example(row: dict, where: str) -> dict:
    """Give a row the names prompt, answer and completion; the other columns stay as they are."""
    example = dict(row)
    for name, aliases in ("prompt", PROMPT_COLUMNS), ("answer", ANSWER_COLUMNS), ("completion", COMPLETION_COLUMNS):
        found = next((alias for alias in aliases if row.get(alias) is not None), None)
        if found:
            example[name] = example.pop(found)
    prompt = example.get("prompt")
    if prompt is None:
        raise ValueError(f"{where} has columns {', '.join(row) or 'none'}; it needs one of {', '.join(PROMPT_COLUMNS)}")
    if isinstance(prompt, list):
        if not all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in prompt):
            raise ValueError(f'{where}: chat messages must look like {{"role": "user", "content": "..."}}')
        if prompt and prompt[-1]["role"] == "assistant":                         # a whole conversation: the end is the lesson
            example["completion"] = prompt[-1]["content"]
            example["prompt"] = prompt = prompt[:-1]
    elif not isinstance(prompt, str):
        raise ValueError(f"{where}: the prompt must be text or chat messages, not {type(prompt).__name__}: {prompt!r}")
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        raise ValueError(f"{where}: the prompt is empty")
    completion = example.get("completion")
    if isinstance(completion, list) and len(completion) == 1 and isinstance(completion[0], dict):
        example["completion"] = completion[0].get("content")                     # an assistant's message
    elif completion is not None and not isinstance(completion, str) and not takes_turns(completion):
        raise ValueError(
            f"{where}: the completion must be text, an assistant's message, or such messages with others between them, "
            f"not {completion!r}"
        )
    answer = example.get("answer")
    if isinstance(answer, str) and "####" in answer:                             # GSM8K: the solution, then the answer
        solution, _, final = answer.rpartition("####")
        example["answer"] = final.strip().replace(",", "")
        reasoning = re.sub(r"<<.*?>>", "", solution).strip()                     # calculator annotations
        example["completion"] = example.get("completion") or demonstration(reasoning, example["answer"])
    elif answer is not None:
        example["answer"] = str(answer)
    return example


def takes_turns(messages) -> bool:
    """Whether these are chat messages, every second one the assistant's, the first and the last among them."""
    try:
        return len(messages) % 2 == 1 and all(
            isinstance(message["content"], str) and (message["role"] == "assistant") == (number % 2 == 0)
            for number, message in enumerate(messages)
        )
    except (TypeError, KeyError):
        return False


# ---- text to tokens ------------------------------------------------------------------------------------------------


def with_instruction(example: dict, instruction: str) -> dict:
    """The example with text put before its prompt, or before the first message of its conversation."""
    if not instruction:
        return example
    prompt = example["prompt"]
    if isinstance(prompt, str):
        return example | {"prompt": f"{instruction}\n{prompt}"}
    first = prompt[0] | {"content": f"{instruction}\n{prompt[0]['content']}"}
    return example | {"prompt": [first, *prompt[1:]]}


def encode_prompt(tokenizer, prompt) -> list[int]:
    """Token ids of a prompt, ready to be continued: with the chat template where the tokenizer has one.

    prompt  a string, chat messages, or token ids (returned as they are). BOS comes once: from the template if there
            is one, from the tokenizer otherwise.
    """
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return prompt
    messages = as_messages(prompt)
    if tokenizer.chat_template:
        return tokenizer(render(tokenizer, messages, add_generation_prompt=True), add_special_tokens=False).input_ids
    if isinstance(prompt, str):
        return tokenizer(prompt).input_ids
    lines = [f"{message['role']}: {message['content']}" for message in messages]
    return tokenizer("\n".join([*lines, "assistant: "])).input_ids


def encode_completion(tokenizer, prompt, completion: str, stop_ids: list[int]) -> list[int]:
    """Token ids of a demonstration, ending with one stop token: the one that the chat template puts there, else EOS."""
    text = completion
    if tokenizer.chat_template:
        messages = as_messages("" if isinstance(prompt[0], int) else prompt)     # how a turn ends does not depend on it
        before = render(tokenizer, messages, add_generation_prompt=True)
        whole = render(tokenizer, [*messages, {"role": "assistant", "content": completion}], add_generation_prompt=False)
        if whole.startswith(before + completion):
            text = whole[len(before) :]
    ids = tokenizer(text, add_special_tokens=False).input_ids
    stop = next((i for i, token in enumerate(ids) if token in stop_ids), None)
    return [*ids, tokenizer.eos_token_id] if stop is None else ids[: stop + 1]


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
        as_text = isinstance(prompt, str) or isinstance(prompt[0], int)
        text = f"\n{said}\n" if as_text else f"\n{message['role']}: {said}\nassistant: "
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


def encode_demonstration(tokenizer, prompt, completion: str | list[dict], stop_ids: list[int]) -> tuple[list[int], list[bool]]:
    """Token ids of a demonstration, and which of them the assistant says; completion: text, or messages in turn."""
    ids, spoken = [], []
    for message in completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]:
        own = message["role"] == "assistant"
        part = (
            encode_completion(tokenizer, prompt, message["content"], stop_ids) if own
            else encode_reply(tokenizer, prompt, message, stop_ids)
        )
        ids += part
        spoken += [own] * len(part)
    return ids, spoken


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
    """A prompt as chat messages: text is what a user says."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


# ---- order ---------------------------------------------------------------------------------------------------------


class ShuffledBatches:
    """Endless batches over examples, shuffled anew every epoch. Its whole state is `position`, an int: save it, set it."""

    def __init__(self, examples: list, batch_size: int, seed: int):
        self.examples, self.batch_size, self.seed = examples, batch_size, seed
        self.position = 0                                 # examples handed out so far
        self.epoch, self.order = -1, []

    def __next__(self) -> list:
        return self.take(self.batch_size)

    def take(self, count: int) -> list:
        """The next so many examples."""
        batch = []
        for position in range(self.position, self.position + count):
            epoch, index = divmod(position, len(self.examples))
            if epoch != self.epoch:
                self.epoch, self.order = epoch, list(range(len(self.examples)))
                random.Random(f"{self.seed} {epoch}").shuffle(self.order)
            batch.append(self.examples[self.order[index]])
        self.position += count
        return batch
