"""Rewards from models: a small random classifier, and a judge whose endpoint is a function."""

import asyncio
import inspect
import json
import math
import time
from functools import partial

import httpx2
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from engine.devices import best_device
from model import byte_tokenizer
from reward_functions import models
from reward_functions.models import classifier, judge, parse_rating

PROMPT = [{"role": "user", "content": "Say hello."}]


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    """A folder with a random reward model: one output."""
    return save(tmp_path_factory.mktemp("reward"), num_labels=1)


def save(folder, num_labels, weights=None, pad_token_id=0, template=None):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=263, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_labels=num_labels,
        pad_token_id=pad_token_id, initializer_range=0.5,
    )
    model = LlamaForSequenceClassification(config)
    if weights is not None:
        model.score.weight.data.fill_(weights)
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_classifiers_points_do_not_depend_on_the_batch(reward_model):
    texts = ["a", "a somewhat longer completion", "", "b"]
    alone = [classifier("liked", reward_model, batch_size=1)([text], prompts=["p"])[0] for text in texts]
    liked = classifier("liked", reward_model, batch_size=3)
    assert liked(texts, prompts=["p"] * 4) == pytest.approx(alone, abs=1e-5)
    assert len(set(alone)) == 4 and liked.__name__ == "liked"
    assert liked([[{"role": "assistant", "content": "a"}]], prompts=[PROMPT])[0] != alone[0], "the prompt counts"


def test_a_chat_template_brings_its_own_bos_and_what_is_no_number_is_no_reward(reward_model, tmp_path):
    lines = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ '' if loop.last else '\n' }}{% endfor %}"
    with_template = classifier("liked", save(tmp_path, 1, template=lines))
    assert with_template(["b"], prompts=["a"]) == classifier("liked", reward_model)(["b"], prompts=["a"])
    assert classifier("broken", save(tmp_path, num_labels=1, weights=math.nan))(["text"], prompts=["p"]) == [None]


def test_padding_is_that_of_the_tokenizer_whatever_the_models_settings_say(reward_model, tmp_path):
    texts = ["a", "a somewhat longer completion", ""]
    expected = classifier("liked", reward_model, batch_size=1)(texts, prompts=["p"] * 3)
    path = save(tmp_path, num_labels=1, pad_token_id=7)
    AutoTokenizer.from_pretrained(path, padding_side="right").save_pretrained(path)
    assert classifier("liked", path, batch_size=3)(texts, prompts=["p"] * 3) == pytest.approx(expected, abs=1e-5)


def test_a_classifier_runs_on_the_device_of_the_run(reward_model, monkeypatch):
    monkeypatch.setattr("engine.devices.chosen_device", "auto")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("meta"))
    used = []
    monkeypatch.setattr(LlamaForSequenceClassification, "to", lambda self, device: used.append(device.type) or self)
    liked = classifier("liked", reward_model)                      # when its file is loaded, the device may be unknown
    best_device("cpu")
    liked(["a"], prompts=["p"])
    assert used == ["cpu"]


def test_of_a_long_conversation_the_end_counts(reward_model):
    short = classifier("liked", reward_model, max_length=8)
    assert short(["x" * 50 + "an ending"], prompts=["p"]) == short(["y" * 50 + "an ending"], prompts=["q"])
    assert short(["x" * 50 + "an ending"], prompts=["p"]) != short(["x" * 50 + "one ending!"], prompts=["p"])


def test_a_classifier_with_labels_gives_a_probability(tmp_path):
    path = save(tmp_path, num_labels=3)
    (points,) = zip(*(classifier("label", path, label=label)(["text"], prompts=["p"]) for label in range(3)))
    assert sum(points) == pytest.approx(1) and all(0 < p < 1 for p in points)


def chat(text):
    return httpx2.Response(200, json={"choices": [{"message": {"role": "assistant", "content": text}}]})


@pytest.fixture
def ask_judge(monkeypatch):
    """Ask a judge whose endpoint is a function of requests. Return the points; asked.requests has the requests."""
    def asked(answer, completions=("one", "two"), **options):
        async def handle(request):
            asked.requests.append(request)
            return await answer(request) if inspect.iscoroutinefunction(answer) else answer(request)

        client = partial(httpx2.AsyncClient, transport=httpx2.MockTransport(handle))
        with monkeypatch.context() as patch:
            patch.setattr(models.httpx2, "AsyncClient", client)
            function = judge("helpful", url="http://localhost/v1", model="some-model", question="How helpful?",
                **dict(timeout=0.5) | options)
            return asyncio.run(function(completions, prompts=[PROMPT] * len(completions)))

    asked.requests = []
    return asked


def test_a_judges_ratings_become_points_in_order(ask_judge):
    assert ask_judge(lambda request: chat("7" if r"\none\n" in request.content.decode() else "10 / 10")) == [0.7, 1.0]
    request = ask_judge.requests[0]
    assert str(request.url) == "http://localhost/v1/chat/completions" and "Authorization" not in request.headers
    body = json.loads(request.content)
    assert body["model"] == "some-model" and body["temperature"] == 0
    assert "How helpful?" in body["messages"][0]["content"] and "user: Say hello." in body["messages"][0]["content"]


@pytest.mark.parametrize("reply,rating", [
    ("7", 0.7), ("Mark: 7.5.", 0.75), ("7/10", 0.7), ("7 out of 10", 0.7), ("<think>3? 4?</think>\n5", 0.5), ("0", 0.0),
    ("", None), ("great", None), ("11", None), ("-1", None), ("3 or 4", None), ("nan", None), ("1e9", None),
    ("\u221210", None), ("7-8", None), ("10 %", None), ("7 percent", None), ("7/10.5", None), ("so...7", 0.7), ("- 7", 0.7),
    ("**7**", 0.7),
])
def test_a_rating_is_the_only_number_in_range(reply, rating):
    if rating is None:
        with pytest.raises(ValueError, match="no rating"):
            parse_rating(reply)
    else:
        assert parse_rating(reply) == rating


async def silence(request):
    await asyncio.sleep(9)


KEY = "sk-0123456789"
FAILURES = {
    "it does not answer": (silence, "TimeoutError"),
    "a redirect": (lambda request: httpx2.Response(307, headers={"Location": "http://other/v1"}), "307"),
    "nested JSON": (lambda request: httpx2.Response(200, text="[" * 500_000), "RecursionError"),
    "no rating": (lambda request: chat("nonsense"), "no rating from 0 to 10 in 'nonsense'"),
    "the key in an error": (lambda request: httpx2.Response(401, extensions={"reason_phrase": f"wrong key {KEY}".encode()}),
        "wrong key"),
    "the key in the reply": (lambda request: chat("x" * 200 + f"{KEY} {KEY}"), "API key"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_judge_that_fails_costs_its_time_limit_and_a_warning_without_the_key(name, ask_judge, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", f" {KEY}\r\n")
    answer, problem = FAILURES[name]
    started = time.monotonic()
    with pytest.warns(UserWarning, match="^judge helpful: ") as warned:
        assert ask_judge(answer, key_variable="JUDGE_KEY") == [None, None]
    assert time.monotonic() - started < 0.5 + 1, "the limit, and a second for a machine with other work"
    sent = [request.headers["Authorization"] for request in ask_judge.requests]
    assert sent == [f"Bearer {KEY}"] * 2, "stripped, and to no other host"
    for message in {str(warning.message) for warning in warned}:
        assert problem in message and len(message) < 330 and KEY[:6] not in message and message.isprintable()


def test_requests_are_concurrent_up_to_the_limit(ask_judge):
    at_once, most = 0, 0

    async def wait(request):
        nonlocal at_once, most
        at_once, most = at_once + 1, max(most, at_once + 1)
        await asyncio.sleep(0.01)
        at_once -= 1
        return chat("1")

    assert ask_judge(wait, [*"abcdefghijkl"], at_once=3) == [0.1] * 12 and most == 3
