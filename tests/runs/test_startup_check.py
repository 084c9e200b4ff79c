"""Each assumption that the start-up check tests is broken here once."""

import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import ARCHITECTURES, build, start_run

import logprobs
import sample
from config import GRPOConfig, ModelConfig
from engine import make_engine
from engine import shared as shared_engine
from engine.device_policy import DevicePolicy
from engine.errors import CannotShare
from engine.models import load_any_policy, save_any_policy
from engine.network import network_of
from logprobs import distribution_of
from policy import Policy, RatioError
from runs import engine_choice
from runs.engine_choice import build_policy
from runs.startup_check import check_sampling, difference

PROMPTS = ["47+85=?", "a longer one"]


def test_a_head_without_the_soft_cap_is_refused(model, shared, monkeypatch):
    model.config.final_logit_softcapping = 5.0
    check_sampling(shared)
    monkeypatch.setattr(logprobs, "scale_and_softcap", lambda model, raw: raw)
    with pytest.raises(ValueError, match=r"^start-up check: policy: logprobs.py and the model's own logits differ by at most .* compute_logits"):
        check_sampling(shared)


def test_positions_that_are_ignored_are_refused(tokenizer, monkeypatch):
    model = ARCHITECTURES["gpt2"]().eval()                # learned positions: rotary ones notice no shift
    monkeypatch.setattr(sample, "positions_of", lambda mask: torch.arange(mask.shape[1]).expand(mask.shape))
    check_sampling(make_engine("shared", model, tokenizer))
    with pytest.raises(ValueError, match=r"^start-up check: sampler and trainer differ by at most .*; try --attn_implementation eager"):
        check_sampling(make_engine("plain", model, tokenizer))


def test_a_check_samples_no_more_tokens_than_the_run(tokenizer):
    """A model with 64 positions, and prompts that leave it four."""
    model, prompt = build("gpt2", {}, n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=263).eval(), list(range(5, 65))
    model.generation_config.eos_token_id = 1
    config = GRPOConfig(generation_max_length=4, engine="shared")
    policy, rollout = build_policy(network_of(model), tokenizer, [prompt, prompt], config)
    assert policy.shares_prompts and rollout.completion_ids.shape[1] == 4


@pytest.mark.parametrize("top_k,added,wrong", [(2, 0.0, False), (0, 0.0, True), (2, math.nan, True)])
def test_another_sampler_is_compared_in_the_distribution_of_the_run(model, tokenizer, top_k, added, wrong):
    """A right one, one that does not restrict its distribution, and one without log-probabilities."""
    policy, own = DevicePolicy(model, tokenizer), GRPOConfig(generation_top_k=2)

    def sample(prompts, config, seeds, **options):
        rollout = policy.sample_batches(prompts, replace(config, generation_top_k=top_k), seeds, **options)
        return replace(rollout, sampling_logp=rollout.sampling_logp + added, distribution=distribution_of(config))

    policy.sampler = SimpleNamespace(sample=sample, sampling=nullcontext)
    with pytest.raises(RatioError, match="first ratios must be 1") if wrong else nullcontext():
        check_sampling(policy, distribution=own)


def unshared(*args):
    raise CannotShare("a layer with state")


def without_prompts(*args, real=shared_engine.pack_groups):
    batch = real(*args)
    for number, block in enumerate(batch.layout.blocks):  # completions do not see their prompt
        batch.layout.blocks[number] = block._replace(prompts=block.prompts[:, :0], padding=block.padding[:1] * 0)
    return batch


def without_keywords(*args):
    raise TypeError("forward got an unexpected keyword argument 'token_layout'")          # code that came with a model


@pytest.mark.parametrize("fault,words", [
    (without_prompts, "shared and plain rows differ by at most"), (unshared, "a layer with state"), (without_keywords, "forward got an")])
def test_prompts_are_not_shared_where_that_is_wrong_and_engine_shared_says_why(model, tokenizer, settings, monkeypatch, fault, words):
    build, notes = partial(build_policy, network_of(model), tokenizer, PROMPTS), []
    assert build(settings)[0].shares_prompts
    monkeypatch.setattr(shared_engine, "pack_groups", fault)
    assert not build(settings, notify=notes.append)[0].shares_prompts
    assert notes[0].startswith(f"  note   prompts are not shared: {words}")
    with pytest.raises(ValueError, match=f"^--engine=shared: prompts are not shared: {words}.*; use --engine plain"):
        build(replace(settings, engine="shared"))


def test_what_only_another_rank_cannot_share_is_shared_by_none(model, tokenizer, settings, monkeypatch, capsys):
    monkeypatch.setattr(engine_choice, "all_gather_object", lambda ok: [ok, False])
    assert not build_policy(network_of(model), tokenizer, PROMPTS, settings)[0].shares_prompts
    assert "prompts are not shared: another rank cannot" in capsys.readouterr().out


def test_an_error_that_is_not_of_the_model_is_raised(model, tokenizer, settings, monkeypatch):
    monkeypatch.setattr(shared_engine, "pack_groups", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        build_policy(network_of(model), tokenizer, PROMPTS, settings)


@pytest.mark.parametrize("numbers,found", [("highest", "two differ by at most 5.0e-02 nat"), ("high", "")])
def test_tf32_is_given_the_tolerance_of_16_bits(model, matmul_precision, numbers, found):
    torch.set_float32_matmul_precision(numbers)
    assert difference(DevicePolicy(model, None), "two", torch.zeros(3), torch.full((3,), 0.05)) == found
    assert difference(DevicePolicy(model, None), "two", torch.full((3,), torch.nan), torch.zeros(3)), "not a number"


def test_a_run_has_the_engine_of_its_flag_and_says_which(tmp_path, capsys):
    for plain in ["--engine", "plain"], ["--generation_max_length", "40"]:       # sharing would save little
        assert type(start_run(tmp_path, *plain).policy) is Policy and "\nengine: policy.py\n" in capsys.readouterr().out
    assert start_run(tmp_path).policy.shares_prompts is True
    printed = capsys.readouterr().out
    assert "\nengine: engine/shared.py extends engine/device_policy.py extends policy.py\n" in printed and "note" not in printed


@pytest.mark.parametrize("configured", [False, True])
def test_a_run_says_that_the_templates_end_of_turn_is_a_stop(tmp_path, capsys, configured):
    model, tokenizer = load_any_policy(ModelConfig())
    tokenizer.add_special_tokens({"pad_token": "<|im_end|>"})
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}A{% endif %}"
    model.resize_token_embeddings(len(tokenizer))
    model.generation_config.eos_token_id = [1, tokenizer.pad_token_id] if configured else 1
    save_any_policy(model, tokenizer, tmp_path / "model")
    start_run(tmp_path / "run", "--model_path", str(tmp_path / "model"))
    assert ("  note   <|im_end|>, which ends a turn in the chat template, also ends completions\n" in capsys.readouterr().out) == (not configured)
