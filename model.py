"""
The policy: loading any causal language model that transformers knows, the built-in tiny Gemma, references,
the value head, saving.

Weights are read and written as safetensors. LoRA adapters are in engine/adapters.py. Left out on purpose:
quantised weights; training on images or sound.
"""

import copy
import json
from contextlib import contextmanager
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoConfig, AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedModel, PreTrainedTokenizerFast,
)
from transformers.utils import logging

from engine.adapters import AdapterReference, add_adapter, has_adapter, trainable_parameters
from engine.devices import is_main
from engine.model_files import (
    adapter_settings, attention_options, auto_class, check_model_path, loading_errors,
)
from engine.precision import precision_of, round_frozen_weights, with_precision
from engine.recomputation import layers_of
from engine.sharding import full_tensor, loading_shards, reshard, set_tensor, shard, shard_weights
from engine.text_model import freeze_towers
from rewards import TAGS

logging.disable_progress_bar()                            # a run has one of its own


def load_tokenizer(config):
    """Load the tokenizer of config.model_path, or the built-in one. Without a pad token it pads with EOS."""
    if not config.model_path:
        return byte_tokenizer()
    variables = json.loads(config.chat_template_kwargs or "null")
    options = {} if variables is None else {"chat_template_kwargs": variables}   # saved with the tokenizer
    with loading_errors(config.model_path, "no tokenizer"):
        check_model_path(config.model_path)
        tokenizer = AutoTokenizer.from_pretrained(
            config.model_path, trust_remote_code=config.trust_remote_code, **options)
        tokenizer("1+1=?")                                # some wrong settings raise only here
    if tokenizer.eos_token_id is None:
        raise ValueError(f"--model_path={config.model_path}: its tokenizer needs an eos_token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token         # harmless: masks come from positions, not from ids
    if config.chat_template == "none":
        tokenizer.chat_template = None
    if variables and not tokenizer.chat_template:
        raise ValueError(f"--chat_template_kwargs={config.chat_template_kwargs}: there is no chat template")
    return tokenizer


def load_policy(config, *, trainable: bool = True):
    """Load the model and the tokenizer of config.model_path, or the built-in ones.

    Weights that are trained are float32 at any precision of the layers: in bfloat16 a step of 1e-6 would be
    rounded away. The model is in evaluation mode and stays there: with dropout, ratios would not be 1 on the
    first step.

    config     a ModelConfig: model_path is a folder, a hub id or empty. With lora_rank, or if the folder
               holds an adapter, the weights are frozen and the adapter is trained. Parts of a model that text
               does not pass through are always frozen
    trainable  False freezes everything, for inference
    returns    model, tokenizer
    raises     ValueError in one line if there is no such model
    """
    tokenizer = load_tokenizer(config)
    with loading_errors(config.model_path, "cannot be loaded"):
        adapter = adapter_settings(config.model_path)
        if adapter and config.lora_rank not in (0, adapter["r"]):
            found = f"the adapter in {config.model_path} has {adapter['r']}"
            raise ValueError(f"--lora_rank={config.lora_rank}: {found}; omit it")
        options = attention_options(config)
        if config.model_path:
            path, trust = adapter.get("base_model_name_or_path", config.model_path), config.trust_remote_code
            cls = auto_class(AutoConfig.from_pretrained(path, trust_remote_code=trust))
            with loading_shards():
                policy, found = cls.from_pretrained(
                    path, dtype=torch.float32, trust_remote_code=trust, output_loading_info=True, **options
                )
        else:
            policy, found = tiny_gemma(tokenizer, **options).eval(), {"missing_keys": set()}
        freeze_towers(policy)
        trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
        if missing := sorted(trained & set(found["missing_keys"])):    # drawn at random
            raise ValueError(
                f"--model_path={path}: its files lack {len(missing)} weights of the model, such as "
                f"{missing[0]}; copy or download all of them"
            )
        if adapter or config.lora_rank:
            add_adapter(policy, config, bool(adapter))
        if not trainable:
            policy.requires_grad_(False)
        return with_precision(policy, config.precision), tokenizer


def move(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Move the model to a device, in place. XLA creates new parameters, so shared ones are tied again."""
    model.to(device)
    if isinstance(model, PreTrainedModel) and not hasattr(model, "mesh"):        # sharded: already there
        model.tie_weights()
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        tied = model.config.get_text_config().tie_word_embeddings
        assert not tied or head.weight is embedding.weight, "head and embedding are not tied after the move"
        shard_weights(model)
    return model


def check_context_length(model: PreTrainedModel, prompt_tokens: int, completion_tokens: int) -> None:
    """Raise ValueError if the longest prompt and completion together exceed the model's positions."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit and prompt_tokens + completion_tokens > limit:
        raise ValueError(
            f"--generation_max_length={completion_tokens}: with prompts of up to {prompt_tokens} tokens that "
            f"exceeds the model's {limit} positions; at most {max(0, limit - prompt_tokens)}, or shorten the "
            "prompts (train.py: --max_prompt_length)"
        )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer for any text: a token per byte of UTF-8, one for each of TAGS, and pad, EOS, BOS."""
    special = ["<pad>", "<eos>", "<bos>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>",
        padding_side="left", clean_up_tokenization_spaces=False,
    )
    fast.add_tokens(list(TAGS))                           # ordinary tokens, so that decoding shows them
    return fast


def tiny_gemma(tokenizer, attn_implementation: str | None = None) -> Gemma3ForCausalLM:
    """Return a Gemma 3 of a million parameters with random weights; every second layer sees 64 tokens."""
    config = Gemma3TextConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, query_pre_attn_scalar=32,
        sliding_window=64, layer_types=["sliding_attention", "full_attention"] * 2,
        max_position_embeddings=4096,
        initializer_range=128**-0.5,                      # with 0.02 training takes twice as many steps
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id, attn_implementation=attn_implementation,
    )
    return Gemma3ForCausalLM(config)


def frozen_copy(model: PreTrainedModel, *, exact: bool = False):
    """Return a reference: a copy of the model, or of its adapter alone, without gradients.

    exact  keep all weights in float32, for a moving average: in 16 bits its small steps would be rounded away
    """
    if has_adapter(model):
        return AdapterReference(model)
    if not hasattr(model, "mesh"):
        reference = copy.deepcopy(model).eval().requires_grad_(False)
        return reference if exact else round_frozen_weights(reference)
    with torch.device("meta"):
        reference = auto_class(model.config).from_config(model.config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        set_tensor(reference, name, torch.nn.Parameter(parameter.detach().clone()))
    for name, buffer in model.named_buffers():
        set_tensor(reference, name, buffer.clone())
    reference.tie_weights()
    reference = with_precision(reference.eval(), precision_of(model)).requires_grad_(False)
    shard(reference if exact else round_frozen_weights(reference), layers_of(reference), model.mesh)
    return reference


@torch.no_grad()
def update_reference(reference, model: PreTrainedModel, alpha: float) -> None:
    """Set reference = alpha * reference + (1 - alpha) * policy; alpha=0 copies the policy exactly."""
    reshard(model)
    if isinstance(reference, torch.nn.Module):
        reshard(reference)
    trained = trainable_parameters(model) if has_adapter(model) else model.parameters()
    for kept, new in zip(reference.parameters(), trained, strict=True):
        kept.lerp_(new.to(kept.device), 1 - alpha) if alpha else kept.copy_(new)


def follow_policy(reference, model: PreTrainedModel, config, step: int, *, skipped: bool) -> None:
    """Update the reference by --reference_mode, after a step of the phase. config: a GRPOConfig."""
    if config.reference_mode == "ema" and not skipped:
        update_reference(reference, model, config.ema_alpha)
    elif config.reference_mode == "periodic" and step % config.reference_update_freq == 0:
        update_reference(reference, model, 0.0)


# ---- beside the model --------------------------------------------------------------------------------------


@contextmanager
def moved_to(model: PreTrainedModel, device: torch.device):
    """Move the model to a device within the context, and back afterwards."""
    original = next(model.parameters()).device
    try:
        yield model if original == device else move(model, device)
    finally:
        if original != device:
            move(model, original)


class ValueHead(torch.nn.Module):
    """Predict the reward expected before each token from its predicting hidden state: (N, H) -> (N,) points.

    Initially 0. No dropout: values at sampling time and in training must come from the same function.

    seed    of the hidden layer's weights, which are the same on all ranks
    """

    def __init__(self, hidden_size: int, seed: int = 0):
        super().__init__()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            self.layers = torch.nn.Sequential(
                torch.nn.LayerNorm(hidden_size), torch.nn.Linear(hidden_size, hidden_size), torch.nn.ReLU(),
                torch.nn.Linear(hidden_size, 1),
            )
        torch.nn.init.zeros_(self.layers[-1].weight)
        torch.nn.init.zeros_(self.layers[-1].bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.layers(hidden.to(self.layers[-1].weight.dtype))[:, 0]


def full_state_dict(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the model's state_dict, gathered if sharded. Called on all ranks; complete on the main one."""
    reshard(model)
    return {name: full_tensor(tensor) for name, tensor in model.state_dict().items()}


def save_policy(model: PreTrainedModel, tokenizer, folder: Path, weights: dict | None = None) -> None:
    """Write a folder that AutoModelForCausalLM and AutoTokenizer load. With an adapter: the adapter alone.

    weights  full_state_dict(model), if it has been gathered already; otherwise all ranks must call this
    """
    weights = full_state_dict(model) if weights is None else weights
    if is_main():
        model.save_pretrained(folder, state_dict=weights)
        tokenizer.save_pretrained(folder)
