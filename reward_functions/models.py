"""
Rewards from models: a sequence classifier in this process, or an LLM judge behind an OpenAI-compatible HTTP
endpoint. Each function returns a reward function; call it in a file that --reward_functions names.

Both can be exploited: a policy learns to maximise a reward model's output with useless text, and to instruct
a judge ("this reply deserves a 10"). Give them a small weight, and read completions.
"""

import asyncio
import math
import os
import re
import warnings
from collections.abc import Callable

import httpx2
import torch

from data import as_messages, as_text
from engine.devices import best_device
from engine.xla import eager_device
from rewards import text_of

TOP = 10                        # best rating


def classifier(
    name: str, model_path: str, *, label: int = -1, batch_size: int = 8, max_length: int = 2048
) -> Callable:
    """Return a reward function that applies a sequence classification model of transformers.

    reward      the model's output if it has one (a reward model, any range), else the probability of `label`,
                0 to 1
    max_length  tokens; longer conversations are truncated at their beginning
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer  # slow to import

    tokenizer = AutoTokenizer.from_pretrained(model_path, truncation_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    network = AutoModelForSequenceClassification.from_pretrained(model_path).eval().requires_grad_(False)
    network.config.get_text_config().pad_token_id = tokenizer.pad_token_id    # to find the last other token

    @torch.no_grad()
    def function(completions, prompts, **columns) -> list[float | None]:
        network.to(eager_device(best_device()))     # --device, but not XLA, which would compile every length
        pairs = zip(prompts, map(text_of, completions), strict=True)
        texts = [format_conversation(tokenizer, prompt, text) for prompt, text in pairs]
        rewards: list[float] = []
        for start in range(0, len(texts), batch_size):
            batch = tokenizer(
                texts[start : start + batch_size], return_tensors="pt", padding=True, truncation=True,
                max_length=max_length, add_special_tokens=not tokenizer.chat_template,
            ).to(network.device)
            logits = network(**batch).logits.float()                                     # (b, labels)
            rewards += (logits[:, 0] if logits.shape[1] == 1 else logits.softmax(-1)[:, label]).tolist()
        return [value if math.isfinite(value) else None for value in rewards]

    function.__name__ = name
    return function


def format_conversation(tokenizer, prompt, text: str) -> str:
    """Return prompt and completion in the model's chat template, or on separate lines if it has none."""
    messages = [*as_messages(prompt), {"role": "assistant", "content": text}]
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template(messages, tokenize=False)
    return "\n".join(message["content"] for message in messages)


def judge(
    name: str, *, url: str, model: str, question: str, key_variable: str = "", timeout: float = 30.0,
    at_once: int = 8, max_tokens: int = 512,
) -> Callable:
    """Return an async reward function that asks a language model to rate each completion from 0 to 10.

    reward        0 to 1: the rating / 10. None, with a warning, if the request fails or the reply has not
                  exactly one number; a failed request is not repeated
    url           of the API: /chat/completions is added; redirects are not followed
    key_variable  the environment variable that holds the API key; "": no key is sent
    timeout       seconds for one request in total: B completions take at most B / at_once * timeout
    """
    api_key = os.environ.get(key_variable, "").strip()

    async def rate(client, slots: asyncio.Semaphore, prompt, completion) -> float | None:
        text = (f"{question}\n\n<prompt>\n{as_text(as_messages(prompt))}\n</prompt>\n\n<reply>\n"
                f"{text_of(completion)}\n</reply>\n\nAnswer with one number from 0 to {TOP}.")
        messages = [{"role": "user", "content": text}]
        body = {"model": model, "temperature": 0, "max_tokens": max_tokens, "messages": messages}
        try:
            async with slots:
                response = await asyncio.wait_for(client.post("chat/completions", json=body), timeout)
            response.raise_for_status()                            # redirects are errors, too
            return parse_rating(response.json()["choices"][0]["message"]["content"])
        except Exception as error:                                 # any failure of the network or the server
            line = repr(error).replace(api_key or "no key", "(API key)")         # a server may send it back
            warnings.warn(f"judge {name}: {line:.300}", stacklevel=2)

    async def function(completions, prompts, **columns) -> list[float | None]:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        slots = asyncio.Semaphore(at_once)
        # Without the timeout of httpx2, which is for one read: a server can send one byte after the other.
        async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=None) as client:
            pairs = zip(prompts, completions, strict=True)
            return await asyncio.gather(*(rate(client, slots, *pair) for pair in pairs))

    function.__name__ = name
    return function


def parse_rating(reply: str) -> float:
    """Return the only number after a reply's thoughts / TOP. Raise ValueError if there is none up to it."""
    text = re.sub(rf"(/|out of)\s*{TOP}\b(?!\.\d)", "", reply.rpartition("</think>")[2])
    numbers = re.findall(r"[-\u2212\u2013]?\d+(?:\.\d+)?(?:\s*(?:%|per ?cent))?", text)
    if len(numbers) != 1 or not re.fullmatch(r"[\d.]+", numbers[0]) or float(numbers[0]) > TOP:
        raise ValueError(f"no rating from 0 to {TOP} in {reply!r}")
    return float(numbers[0]) / TOP
