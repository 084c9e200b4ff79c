"""Small models of six architectures, with random weights large enough that every logit matters."""

import pytest
import torch
from transformers import (
    Gemma2Config, Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig,
    Lfm2Config, Lfm2ForCausalLM, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM,
)

from config import GRPOConfig, parse_config
from model import byte_tokenizer
from prepare import begin_phase, set_up

SIZES = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    vocab_size=263, pad_token_id=0, eos_token_id=1, bos_token_id=2, initializer_range=0.3,
)


def build_gpt2():
    sizes = dict(n_embd=32, n_layer=2, n_head=4, n_positions=256, vocab_size=263, initializer_range=0.3)
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1))  # one id for both, dropout 0.1


ARCHITECTURES = {
    # Windows shorter than the prompts; Gemma 2 with soft caps on attention scores and logits, and eager attention.
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(
        **SIZES, sliding_window=5, query_pre_attn_scalar=8, final_logit_softcapping=10.0, attn_logit_softcapping=5.0,
        attn_implementation="eager")),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(
        **SIZES, sliding_window=5, query_pre_attn_scalar=8, layer_types=["sliding_attention", "full_attention"])),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5)),
    "gpt2": build_gpt2,
}


@pytest.fixture(scope="session")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(params=ARCHITECTURES)
def architecture(request):
    """Name and model, in evaluation mode."""
    torch.manual_seed(0)
    return request.param, ARCHITECTURES[request.param]().eval()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return ARCHITECTURES["gemma3"]().eval()


@pytest.fixture
def convolutional():
    """Layers that carry state from token to token: short convolutions beside attention."""
    torch.manual_seed(0)
    return Lfm2ForCausalLM(Lfm2Config(
        vocab_size=263, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        layer_types=["conv", "full_attention"], block_multiple_of=8, pad_token_id=0, eos_token_id=1, bos_token_id=2,
        initializer_range=0.3,
    )).eval()


@pytest.fixture
def settings():
    """The defaults (temperature 0.8, top-p 0.9, top-k 50), with short completions."""
    return GRPOConfig(generation_max_length=12)


PROMPTS = ["1+1=?", "a somewhat longer prompt than the first", "é", "a somewhat longer prompt than the first"]
QUICK = "--limit 400 --eval_limit 8 --report_to none --batch_size 4 --num_completions_per_prompt 4 --eval_steps 0".split()


def start_run(folder, *flags):
    """A run of the built-in model that is ready for a step of its last phase, later than the first one."""
    config = parse_config([*QUICK, "--output_dir", str(folder / "unused"), "--eval_limit", "0", "--max_steps", "10", *flags])
    run = set_up(config)
    run.phase = len(run.phases) - 1
    begin_phase(run, run.phases[-1])
    run.phase_step = 1                                    # ratios may differ from 1
    return run
