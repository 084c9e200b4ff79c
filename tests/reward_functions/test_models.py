"""Rewards from models: a small random classifier, and a judge that is a server in this process."""

import asyncio
import contextlib
import gc
import json
import math
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from model import byte_tokenizer
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
    assert liked(["a"], prompts=[[5, 6]]) == liked(["a"], prompts=[""]), "token ids of another tokenizer have nothing to show"


def test_of_a_long_conversation_the_end_counts(reward_model):
    short = classifier("liked", reward_model, max_length=8)
    assert short(["x" * 50 + "an ending"], prompts=["p"]) == short(["y" * 50 + "an ending"], prompts=["q"])
    assert short(["x" * 50 + "an ending"], prompts=["p"]) != short(["x" * 50 + "one ending!"], prompts=["p"])


def test_a_classifier_with_labels_gives_a_probability(tmp_path):
    path = save(tmp_path, num_labels=3)
    (points,) = zip(*(classifier("label", path, label=label)(["text"], prompts=["p"]) for label in range(3)))
    assert sum(points) == pytest.approx(1) and all(0 < p < 1 for p in points)


def test_a_chat_template_brings_its_own_bos(reward_model, tmp_path):
    lines = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ '' if loop.last else '\n' }}{% endfor %}"
    with_template = classifier("liked", save(tmp_path, 1, template=lines))
    assert with_template(["b"], prompts=["a"]) == classifier("liked", reward_model)(["b"], prompts=["a"])


def test_points_that_are_no_number_leave_completions_unscored(tmp_path):
    assert classifier("broken", save(tmp_path, num_labels=1, weights=math.nan))(["text"] * 2, prompts=["p"] * 2) == [None, None]


# ---- the judge -----------------------------------------------------------------------------------------------------


class Endpoint:
    """An OpenAI-compatible server that answers with what `reply` says, and counts."""

    def __init__(self, reply):
        endpoint, self.requests, self.at_once, self.most_at_once = self, [], 0, 0
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    endpoint.requests.append((self.path, asked, dict(self.headers)))
                    endpoint.at_once += 1
                    endpoint.most_at_once = max(endpoint.most_at_once, endpoint.at_once)
                with contextlib.suppress(OSError):
                    answer = reply(asked, len(endpoint.requests), self)
                    if answer is not None:
                        self.send_response(200)
                        self.end_headers()
                        body = answer if isinstance(answer, bytes) else json.dumps(chat(answer)).encode()
                        self.wfile.write(body)
                with lock:
                    endpoint.at_once -= 1

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.server.shutdown()
        self.server.server_close()


def chat(text):
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def ask_judge(url, completions=("one", "two"), **options):
    function = judge("helpful", url=url, model="some-model", question="How helpful?", **dict(timeout=0.5) | options)
    return rate(function, list(completions), prompt=PROMPT)


def rate(function, completions, prompt="p"):
    return asyncio.run(function(completions, prompts=[prompt] * len(completions)))


def test_a_judges_ratings_become_points_in_order():
    with Endpoint(lambda asked, n, _: "7" if "\none\n" in asked["messages"][0]["content"] else "10 / 10") as endpoint:
        assert ask_judge(endpoint.url) == [0.7, 1.0]
    path, asked, _ = endpoint.requests[0]
    assert path == "/v1/chat/completions" and asked["model"] == "some-model" and asked["temperature"] == 0
    assert "How helpful?" in asked["messages"][0]["content"] and "user: Say hello." in asked["messages"][0]["content"]


@pytest.mark.parametrize(
    "reply,rating",
    [("7", 0.7), ("Mark: 7.5.", 0.75), ("7/10", 0.7), ("7 out of 10", 0.7), ("<think>3? 4?</think>\n5", 0.5), ("0", 0.0),
     ("", None), ("great", None), ("11", None), ("-1", None), ("3 or 4", None), ("nan", None), ("1e9", None),
     ("\u221210", None), ("\u20137", None), ("(\u22127)", None), ("7-8", None), ("10%", None), ("10 %", None), ("7\uff05", None), ("7 percent", None),
     ("10/10%", None), ("7/10.5", None), (".5", 0.05), ("so...7", 0.7), ("- 7", 0.7), ("\u0667", 0.7), ("**7**", 0.7)],
)
def test_a_rating_is_the_only_number_in_range(reply, rating):
    if rating is None:
        with pytest.raises(ValueError, match="no rating"):
            parse_rating(reply)
    else:
        assert parse_rating(reply) == rating


def slow(asked, n, handler):
    time.sleep(1)


def test_a_judge_that_is_down_gives_none_and_a_warning_says_so():
    with Endpoint(slow) as endpoint:
        url = endpoint.url
    with pytest.warns(UserWarning, match="judge helpful: ConnectError"):
        assert ask_judge(url) == [None, None]


def test_requests_are_concurrent_up_to_the_limit():
    def wait(asked, n, handler):
        time.sleep(0.05)
        return "1"

    with Endpoint(wait) as endpoint:
        texts = [str(i) for i in range(12)]
        assert ask_judge(endpoint.url, texts, at_once=3) == [0.1] * 12
        assert endpoint.most_at_once == 3


# ---- a judge that misbehaves ---------------------------------------------------------------------------------------

KEY = "sk-0123456789"
OK = b"HTTP/1.1 200 OK\r\n"
RATED = json.dumps(chat("7")).encode()


class RawServer:
    """A server whose answer to a connection is what a function writes to the socket."""

    def __init__(self, answer):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port, self.received, self.ended = self.listener.getsockname()[1], [], threading.Event()

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = self.listener.accept()
                    threading.Thread(target=talk, args=(connection,), daemon=True).start()

        def talk(connection):
            with connection, contextlib.suppress(OSError):
                self.received.append(connection.recv(1 << 16))
                answer(connection, self)
                connection.shutdown(socket.SHUT_WR)                # closed with a part of the request unread, it would be reset
                while connection.recv(1 << 16):
                    pass
            self.ended.set()

        threading.Thread(target=serve, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.listener.close()


def write(*parts, forever=b"", pause=0.0):
    """An answer: the parts, then the last one again and again until the other side ends the connection."""
    def answer(connection, server):
        connection.sendall(b"".join(parts))
        while forever:
            connection.sendall(forever)
            time.sleep(pause)
    return answer


def one_byte_at_a_time(text):
    def answer(connection, server):
        for byte in text:
            connection.sendall(bytes([byte]))
            time.sleep(0.02)
    return answer


MISBEHAVIOUR = {
    "headers byte by byte": one_byte_at_a_time(OK + b"X-Header: x\r\n" * 99),
    "endless body": write(OK, b"\r\n", RATED, forever=b" " * 9999),
    "silence": lambda connection, server: connection.recv(1),
    "an end in the body": write(OK, b"Content-Length: 999\r\n\r\n", RATED),
    "the key in the status": write(f"HTTP/1.1 401 wrong key {KEY}\r\n\r\n".encode()),
    "the key in the reply": write(OK, b"\r\n", json.dumps(chat("x" * 230 + f"{KEY} {KEY}")).encode()),
    "nested JSON": write(OK, b"\r\n", b"[" * 500_000),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "way,scheme", [*((way, "http") for way in MISBEHAVIOUR), ("silence", "https")],
)
def test_a_server_that_misbehaves_costs_its_time_limit_and_a_warning(way, scheme, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with RawServer(MISBEHAVIOUR[way]) as server:
        started = time.monotonic()
        with pytest.warns(UserWarning, match="^judge helpful: ") as warned:
            assert ask_judge(f"{scheme}://127.0.0.1:{server.port}/v1", ["one"], key_variable="JUDGE_KEY") == [None]
        assert time.monotonic() - started < 0.5 + 1, "the limit, and a second for a machine with other work"
        assert server.ended.wait(1.5) or (gc.collect() and server.ended.wait(1)), "the connection is closed"
    (message,) = {str(warning.message) for warning in warned}
    assert len(message) < 330 and KEY[:6] not in message and message.isprintable()


def test_a_redirect_is_not_followed_and_the_key_stays_with_its_host(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with RawServer(write(OK, b"\r\n", RATED)) as other:
        for status in 301, 302, 303, 307, 308:
            head = f"HTTP/1.1 {status} Moved\r\nLocation: http://localhost:{other.port}/v1/chat/completions\r\n\r\n"
            with RawServer(write(head.encode())) as server, pytest.warns(UserWarning, match=f"{status} Moved"):
                assert ask_judge(f"http://127.0.0.1:{server.port}/v1", ["one"], key_variable="JUDGE_KEY") == [None]
            assert len(server.received) == 1, "it would be the same again"
        assert other.received == []


def test_a_key_is_stripped(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", f" {KEY}\r\n")
    with Endpoint(lambda asked, n, _: "1") as endpoint:
        assert ask_judge(endpoint.url, ["one"], key_variable="JUDGE_KEY") == [0.1]
    assert endpoint.requests[0][2]["Authorization"] == f"Bearer {KEY}"
