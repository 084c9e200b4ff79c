"""The memory that is told at the start of a run: activations are measured, and a pass has as many tokens as fit."""

from types import SimpleNamespace

import psutil
import pytest
import torch

from config import Config
from engine import make_engine
from runs import memory
from runs.memory import activations_of_token, describe_memory, fit_tokens
from runs.startup_check import short_completions

PROMPTS = ["1+1=?", "a prompt that is longer than the first one"]


@pytest.mark.parametrize("engine", ["plain", "shared"])
def test_what_autograd_keeps_grows_with_the_tokens_as_measured(model, tokenizer, engine):
    """Three rows keep as much more than two as their tokens say; without layers that are trained, less is kept."""
    policy = make_engine(engine, model, tokenizer)
    rollout = policy.sample(PROMPTS, short_completions(16), 0, num_completions=2)
    of_token = activations_of_token(policy, rollout)
    hidden, layers = model.config.hidden_size, model.config.num_hidden_layers
    assert 20 * layers * hidden < of_token < 400 * layers * hidden, "bytes: 5 to 100 tensors of the hidden size in each layer"
    model.model.layers[:2].requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)
    assert activations_of_token(policy, rollout) < 0.9 * of_token


def test_a_pass_has_as_many_tokens_as_fit_in_half_of_the_free_memory(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    cpu = torch.device("cpu")
    assert [fit_tokens(64, of_token, 10, cpu) for of_token in (1.0, 7.8, 7.9, 16.0, 100.0)] == [64, 64, 32, 16, 10]


def test_the_parts_of_the_memory_are_those_in_use_optimiser_copy_activations_and_logits(model, tokenizer, monkeypatch):
    monkeypatch.setattr(memory, "memory_in_use", lambda device: 4 * model.num_parameters())
    monkeypatch.setattr(memory, "GB", model.num_parameters())
    policy = make_engine("plain", model, tokenizer, max_tokens=100)
    of_token = model.num_parameters() / 100               # so that activations count 1
    config = Config.of(use_grpo=True, use_kl_penalty=True, batch_size=2, num_completions_per_prompt=4)
    logits = 8 * 263 * 20 / model.num_parameters()
    assert describe_memory(policy, of_token, config) == (
        f"memory: at least {4 + 12 + 4 + 1 + logits:.1f} GB (in use now 4.0, gradients and optimiser 12.0, reference 4.0, "
        f"activations of 100 tokens 1.0, logits of 8 completions x 263 tokens {logits:.1f})")
    teacher = Config.of(**config.flags | {"reference_path": "a teacher, which is in use already"})
    assert "reference" not in describe_memory(policy, of_token, teacher)
    model.requires_grad_(False)
    without = Config.of(use_grpo=True, batch_size=2000, num_completions_per_prompt=4)
    assert describe_memory(policy, 0.0, without).endswith(f" (in use now 4.0, logits of 8000 completions x 263 tokens {1000 * logits:.1f})")
