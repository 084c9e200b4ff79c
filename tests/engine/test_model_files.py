"""Folders and hub ids. The hub is a local server that answers as the real one does."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import QUICK, build_gpt2

from config import ModelConfig
from engine.model_files import check_model_path
from engine.policy import load_any_policy, save_any_policy

ROOT = Path(__file__).parents[2]
COMMIT = "a" * 40


class Hub(BaseHTTPRequestHandler):
    """Serves the folders under `root`; all other ids are not found."""

    protocol_version, root = "HTTP/1.1", None

    def do_GET(self):
        path = self.path.partition("?")[0].removeprefix("/")
        is_api, path = path.startswith("api/models/"), path.removeprefix("api/models/")
        name = path.partition("/resolve/")[0].partition("/tree/")[0].partition("/revision/")[0]
        folder = self.root / name
        if not folder.is_dir():
            self.answer(401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Invalid username or password."})
        elif is_api and "/tree/" in path:
            self.answer(404, {"X-Error-Code": "EntryNotFound"})
        elif is_api:
            answer = json.dumps({"id": name, "sha": COMMIT, "siblings": []})
            self.answer(200, {"Content-Type": "application/json"}, answer.encode())
        else:
            file = folder / path.partition("/resolve/")[2].partition("/")[2]
            if file.is_file():
                content = file.read_bytes()
                etag = f'"{hashlib.sha1(content).hexdigest()}"'
                self.answer(200, {"ETag": etag, "X-Repo-Commit": COMMIT}, content)
            else:
                self.answer(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})

    do_HEAD = do_GET

    def answer(self, status, headers, content=b""):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": len(content)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def hub(tmp_path_factory, tokenizer):
    """The address of a hub that has one model, gpt2."""
    Hub.root = tmp_path_factory.mktemp("hub")
    save_any_policy(build_gpt2(), tokenizer, Hub.root / "gpt2")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def run(words, address, cache, **variables):
    """Run a Python program of its own: the address is read when huggingface_hub is imported."""
    cleared = {"HF_HUB_OFFLINE": "0", "HF_HUB_CACHE": f"{cache}/hub", "HF_TOKEN": ""}
    environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(cache), "OMP_NUM_THREADS": "1", **cleared, **variables}
    return subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


TRAIN = ["train.py", "--use_grpo", *QUICK, "--max_steps", "1", "--generation_max_length", "8"]


@pytest.mark.slow
def test_a_hub_that_cannot_be_reached_is_one_line_at_once_in_both_programs(tmp_path):
    nowhere = "http://127.0.0.1:9"
    wanted = "no such folder as own/model; from the hub: ConnectError: [Errno 111] Connection refused\n"
    for words in [*TRAIN, "--output_dir", str(tmp_path / "run")], ["infer.py", "--question", "1+1=?"]:
        start = time.monotonic()
        done = run([*words, "--model_path", "own/model"], nowhere, tmp_path / "home")
        assert done.stderr == f"{words[0]}: error: --model_path=own/model: {wanted}"
        assert done.returncode == 2 and not done.stdout
        assert time.monotonic() - start < 60, "transformers would retry for 23 seconds, several times"


@pytest.mark.slow
def test_an_id_without_an_owner_is_downloaded_and_trained_and_later_loads_without_the_hub(hub, tmp_path):
    done = run([*TRAIN, "--model_path", "gpt2", "--output_dir", str(tmp_path / "run")], hub, tmp_path / "home")
    assert done.returncode == 0 and (tmp_path / "run/final/model.safetensors").exists(), done.stderr
    assert "model gpt2: " in done.stdout
    done = run([*TRAIN, "--model_path", "nobody/model", "--output_dir", str(tmp_path / "other")], hub, tmp_path / "home")
    assert "error: --model_path=nobody/model: no such folder as nobody/model; from the hub: RepositoryNotFoundError: " in done.stderr
    words = ["infer.py", "--question", "1+1=?", "--generation_max_length", "4", "--model_path", "gpt2"]
    done = run(words, "http://127.0.0.1:9", tmp_path / "home", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr


def test_a_folder_of_that_name_comes_before_the_hub(tmp_path, tokenizer, monkeypatch):
    save_any_policy(build_gpt2(), tokenizer, tmp_path / "gpt2")
    monkeypatch.chdir(tmp_path)
    assert load_any_policy(ModelConfig(model_path="gpt2"))[0].config.model_type == "gpt2"


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/at/all", "a/b/c", "a b", ".hidden", "kaggle:google/gemma-2"])
def test_what_cannot_be_an_id_is_not_looked_up(path):
    with pytest.raises(ValueError) as error:
        check_model_path(path)
    assert str(error.value).startswith(f"--model_path={path}: no such folder as {path}; from the hub: HFValidationError: ")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    build_gpt2().save_pretrained(tmp_path)                # some classes of tokenizers would make an empty one
    with pytest.raises(ValueError, match=f"^--model_path={tmp_path}: it has no tokenizer.json or "):
        load_any_policy(ModelConfig(str(tmp_path)))
