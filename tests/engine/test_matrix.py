"""
Architecture x engine x scenario: both samplers draw the same, and both trainers compute what transformers computes for a row alone.

The plain sampler is compared with each completion alone, token by token, in tests/test_sample.py, and the shared one here with it.
"""

import copy
from dataclasses import replace

import pytest
import torch
from conftest import ARCHITECTURES, MODELS, PROMPTS, WITH_STATE, logits_alone, with_noise
from torch.nn.utils import parameters_to_vector
from transformers.modeling_layers import GradientCheckpointingLayer

from config import GRPOConfig, ModelConfig
from engine import cache, make_engine, sampler
from engine.models import load_any_policy, save_any_policy
from engine.network import recompute_activations, set_precision
from engine.text_model import text_model
from experience import Batch, add_trainer_logp

RAGGED = [*PROMPTS, "x"]
EARLY = list(range(1, 30))                                # stop ids, so that completions end at different times
CONFIG = GRPOConfig(
    num_completions_per_prompt=3, generation_max_length=24, generation_temperature=1.2, generation_top_p=0.95, generation_top_k=100)
SAMPLERS = [                    # room for new tokens, columns and tokens between two looks, completions at once
    (2, 3, 1, 6), (2, 32, 3, 0), (32, 3, 100, 6), (64, 32, 1, 0)]


def build(name):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    model.generation_config.eos_token_id = EARLY
    return model


def gradient(model, loss):
    model.zero_grad()
    loss.backward()
    return parameters_to_vector(p.grad for p in model.parameters() if p.grad is not None)


def of_transformers(model, rollout, slopes):
    """Log-probabilities, entropies and their gradient with slopes, each row alone, without padding."""
    results, loss = torch.zeros(2, *rollout.completion_mask.shape), 0.0
    for row, mask in enumerate(rollout.completion_mask):
        logits, ids = logits_alone(model, rollout, row)
        log_p = (logits / rollout.distribution["temperature"]).log_softmax(-1)
        alone = torch.stack([log_p.gather(-1, ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)])
        results[:, row, mask] = alone.detach()
        loss = loss + (slopes[:, row, mask] * alone).sum()
    return results, gradient(model, loss)


@pytest.mark.parametrize("number,name", enumerate(MODELS))
def test_engines_sample_the_same_and_have_the_values_and_gradients_of_transformers(number, name, tokenizer, monkeypatch):
    """Of ragged groups, several in a pass; windows are shorter than prompts and completions. Also with recomputed activations."""
    model = build(name)
    engines = [make_engine(engine, model, tokenizer) for engine in ("plain", "shared") if engine == "plain" or name not in WITH_STATE]
    sampled = engines[0].sample(RAGGED, CONFIG, seeds=3)
    assert len(set(sampled.completion_mask.sum(dim=1).tolist())) > 2
    samplers = SAMPLERS if name in ARCHITECTURES else [SAMPLERS[number % 4]] * (len(engines) - 1)
    for capacity, columns, tokens, size in samplers:
        monkeypatch.setitem(sampler.INITIAL_CAPACITY, "cpu", capacity)
        monkeypatch.setattr(cache, "COLUMNS_AT_ONCE", columns)
        monkeypatch.setitem(sampler.TOKENS_BETWEEN_CHECKS, "cpu", tokens)
        again = engines[1].sample(RAGGED, replace(CONFIG, generation_batch_size=size), seeds=3)
        assert again.completions == sampled.completions and again.completion_ids.equal(sampled.completion_ids)
        torch.testing.assert_close(again.sampling_logp, sampled.sampling_logp, atol=1e-4, rtol=1e-4)
    whole, rows = replace(sampled, distribution=dict(temperature=0.7)), torch.arange(15)
    slopes = torch.randn(2, *whole.completion_mask.shape, generator=torch.Generator().manual_seed(5))
    expected, truth = of_transformers(model, whole, slopes)
    for engine in engines:
        torch.testing.assert_close(engine.log_probs(sampled).logp, sampled.sampling_logp, atol=1e-4, rtol=1e-4)
        new = engine.forward(whole, rows)
        found = torch.stack([new.logp, new.entropy])
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
        first = gradient(model, (found * slopes).sum())
        assert (first - truth).norm() < 3e-5 * truth.norm()
    calls, layer = [], next(module for module in text_model(model).modules() if isinstance(module, GradientCheckpointingLayer))
    recompute_activations(model)
    next(layer.children()).register_forward_hook(lambda *args: calls.append(1))
    new = engine.forward(whole, rows)
    assert gradient(model, (torch.stack([new.logp, new.entropy]) * slopes).sum()).equal(first)
    assert len(calls) == 2, "once forward, and once again backward"
    assert not any(module.training for module in model.modules()), "no dropout"
    assert model.config.get_text_config()._attn_implementation in ("sdpa", "eager"), "as it was before"


EXPERTS = "qwen3_moe", "gpt_oss", "gemma4_experts", "glm4_moe"


@torch.no_grad()
@pytest.mark.parametrize("name,precision,lora_rank", [
    *((name, precision, 0) for name in ARCHITECTURES for precision in ("bfloat16", "float16")),
    *((name, precision, rank) for name in EXPERTS for precision, rank in (("float32", 4), ("bfloat16", 4), ("bfloat16", 0))),
])
def test_in_16_bits_and_with_adapters_sampler_and_trainer_round_alike(name, precision, lora_rank, tokenizer, tmp_path):
    """Experts and routers have no adapter."""
    model = build(name)
    if lora_rank:
        save_any_policy(model, tokenizer, tmp_path)
        model, _ = load_any_policy(ModelConfig(str(tmp_path), lora_rank=lora_rank, precision=precision))
        adapted = {name.partition("lora_")[0] for name, parameter in with_noise(model).named_parameters() if parameter.requires_grad}
        assert len(adapted) >= 8 and not any(word in name for name in adapted for word in ("router.", ".experts.", "mlp.gate."))
    else:
        set_precision(model, precision)
    shared, plain = (make_engine(engine, model, tokenizer) for engine in ("shared", "plain"))
    rollout = shared.sample(PROMPTS, replace(CONFIG, generation_temperature=1.0, generation_top_k=0, generation_top_p=1.0), 0)
    for engine in shared, plain:
        engine.require_ratios_of_1(add_trainer_logp(Batch.of_rollout(rollout, torch.ones(len(rollout.finished), 1)), engine))
    apart = (rollout.sampling_logp - shared.log_probs(rollout).logp).abs()[rollout.completion_mask].mean()
    assert apart < 4e-3 or name in EXPERTS                # 0.0014 on AVX2 alone; 0.01 with kernels of their own


@pytest.mark.parametrize("engine", ["plain", "shared"])
@pytest.mark.parametrize("pad", [1, 50, 263], ids=["a stop id", "a token that is sampled", "a token that the model does not know"])
def test_what_pads_changes_nothing_for_masks_do_not_look_at_ids(pad, engine, tokenizer):
    model, other = build("gemma3"), copy.deepcopy(tokenizer)
    with torch.no_grad():
        model.get_output_embeddings().weight[50] *= 3
    other.add_special_tokens({"pad_token": "<another pad>" if pad == 263 else tokenizer.convert_ids_to_tokens(pad)})
    expected, found = (make_engine(engine, model, each).sample(RAGGED, CONFIG, seeds=0) for each in (tokenizer, other))
    mask = expected.completion_mask
    assert other.pad_token_id == pad and (expected.completion_ids == 50)[mask].any() and not mask.all()
    assert found.completion_mask.equal(mask) and found.completion_ids[mask].equal(expected.completion_ids[mask])
    torch.testing.assert_close(make_engine(engine, model, other).log_probs(found).logp, expected.sampling_logp, atol=1e-4, rtol=1e-4)
