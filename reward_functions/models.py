"""
Points from models: a sequence classifier in this process, or a language model behind an OpenAI-compatible HTTP endpoint.
Each function here makes a reward function, in a file of your own that --reward_functions names:

    # taste.py
    from rewards import classifier, judge

    liked = classifier("liked", "path/to/reward-model")
    helpful = judge("helpful", url="http://localhost:8000/v1", model="qwen", question="How helpful is the reply?")

    python train.py --use_grpo --reward_functions correctness taste.py:helpful --reward_weights 1 0.2

What a model likes is not what is right: a policy finds out what it likes beyond reason, and can talk to a judge ("this reply
deserves a 10"). Give it a small weight and look at completions.
"""

import hashlib
import http.client
import itertools
import json
import math
import os
import re
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from engine.chat_template import as_messages, as_text
from engine.devices import best_device, eager_device
from reward_functions.answers import text_of

REPLY_BYTES = 1 << 20           # the longest reply of a judge that is read


def classifier(
    name: str, model_path: str, *, label: int = -1, batch_size: int = 8, max_length: int = 2048, device: str | None = None
) -> Callable:
    """A reward function from a sequence classification model of transformers.

    points      its output where it has one (a reward model, any range), else the probability of `label`, 0 to 1
    max_length  tokens; of longer conversations the beginning is left out
    device      "cpu", "cuda"; None: where training computes, and beside XLA, which would compile every length, the CPU
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer  # slow to import

    tokenizer = AutoTokenizer.from_pretrained(model_path, truncation_side="left")
    model = AutoModelForSequenceClassification.from_pretrained(model_path).eval().requires_grad_(False)
    model.to(device or eager_device(best_device()))
    if model.config.pad_token_id is None:                          # it looks for the last token that is not padding
        model.config.pad_token_id = tokenizer.pad_token_id

    @torch.no_grad()
    def function(completions, prompts, **columns) -> list[float | None]:
        texts = [conversation(tokenizer, p, text_of(c)) for p, c in zip(prompts, completions, strict=True)]
        points: list[float] = []
        for start in range(0, len(texts), batch_size):
            batch = tokenizer(
                texts[start : start + batch_size], return_tensors="pt", padding=True, truncation=True, max_length=max_length,
                add_special_tokens=not tokenizer.chat_template,
            ).to(model.device)
            logits = model(**batch).logits.float()                               # (b, labels)
            points += (logits[:, 0] if logits.shape[1] == 1 else logits.softmax(-1)[:, label]).tolist()
        return [value if math.isfinite(value) else None for value in points]

    function.__name__ = name
    return function


def conversation(tokenizer, prompt, text: str) -> str:
    """Prompt and completion as the model's chat template has them, or one after the other."""
    messages = as_messages(prompt)
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": text}], tokenize=False)
    return "\n".join([*(message["content"] for message in messages), text])


def judge(
    name: str, *, url: str, model: str, question: str, top: float = 10.0, key_variable: str = "", timeout: float = 30.0,
    retries: int = 2, backoff: float = 0.5, at_once: int = 8, cache: str = "", max_tokens: int = 512,
) -> Callable:
    """A reward function that asks a language model for a mark.

    points        0 to 1: the mark / top. None where there is no mark from 0 to top in the reply, or no reply: a judge that
                  is down, slow or talks nonsense leaves completions unscored, and a warning says why
    url           of the API: /chat/completions is added
    key_variable  the environment variable that holds the key; "": none is sent
    timeout       seconds for one answer, tried 1 + retries times with a pause of backoff, 2 * backoff, ... seconds. So
                  B completions take no longer than B / at_once * ((1 + retries) * timeout + pauses)
    cache         a file in which marks are kept between runs; "": in memory alone
    """
    marks: dict[str, float] = {}
    if cache and Path(cache).exists():
        marks |= dict(json.loads(line) for line in Path(cache).read_text().splitlines())
    lock = threading.Lock()

    def points(prompt, completion) -> float | None:
        asked = {
            "model": model, "temperature": 0, "max_tokens": max_tokens,
            "messages": [{"role": "user", "content": as_question(question, prompt, text_of(completion), top)}],
        }
        key = hashlib.sha256(json.dumps([url, asked]).encode()).hexdigest()
        if key in marks:
            return marks[key]
        try:
            mark = read_mark(ask(url, asked, os.environ.get(key_variable, ""), timeout, retries, backoff), top)
        except Exception as error:                                 # whatever is between us and the judge
            warnings.warn(f"judge {name}: {type(error).__name__}: {error}", stacklevel=2)
            return None
        with lock:
            marks[key] = mark
            if cache:
                with open(cache, "a") as file:
                    file.write(json.dumps([key, mark]) + "\n")
        return mark

    def function(completions, prompts, **columns) -> list[float | None]:
        with ThreadPoolExecutor(at_once) as threads:
            return list(threads.map(points, prompts, completions))

    function.__name__ = name
    return function


def as_question(question: str, prompt, text: str, top: float) -> str:
    """What the judge reads."""
    shown = f"<prompt>\n{as_text(as_messages(prompt))}\n</prompt>\n\n<reply>\n{text}\n</reply>"
    return f"{question}\n\n{shown}\n\nAnswer with one number from 0 to {top:g}."


def read_mark(reply: str, top: float) -> float:
    """The only number in a reply, as a share of top. Raises ValueError if there is none, or another, or one out of range."""
    said = re.sub(r"<think>.*?</think>", "", reply, flags=re.DOTALL)
    said = re.sub(rf"(/|out of)\s*{top:g}\b", "", said)
    numbers = re.findall(r"-?\d+(?:\.\d+)?", said)
    if len(numbers) != 1 or not 0 <= float(numbers[0]) <= top:
        raise ValueError(f"no mark from 0 to {top:g} in {reply!r:.80}")
    return float(numbers[0]) / top


def ask(url: str, asked: dict, key: str, timeout: float, retries: int, backoff: float) -> str:
    """The text that an OpenAI-compatible endpoint answers. Tries again where that may help; raises what went wrong last."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(f"{url.rstrip('/')}/chat/completions", json.dumps(asked).encode(), headers)
    for attempt in itertools.count():
        try:
            return json.loads(read_within(request, timeout))["choices"][0]["message"]["content"]
        except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException) as error:
            refused = isinstance(error, urllib.error.HTTPError) and error.code < 500 and error.code != 429
            if refused or attempt == retries:
                raise
        time.sleep(backoff * 2**attempt)


def read_within(request: urllib.request.Request, seconds: float) -> bytes:
    """The body of an answer. urllib's own timeout is per read, and a server may send a byte now and then for ever."""
    deadline, body = time.monotonic() + seconds, b""
    with urllib.request.urlopen(request, timeout=seconds) as response:
        while chunk := response.read1(1 << 16):
            body += chunk
            if time.monotonic() > deadline or len(body) > REPLY_BYTES:
                raise TimeoutError(f"the answer is longer than {REPLY_BYTES} bytes or {seconds:g} s")
    return body
