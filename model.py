"""
The policy: loading any causal language model that transformers knows, the built-in tiny Gemma, frozen copies, the value
head, saving.

Weights are read and written as safetensors. Left out on purpose: adapters and quantised weights.
"""

import copy
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig, AutoModelForCausalLM, AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging

from devices import shard_weights

logging.disable_progress_bar()                            # a run has one of its own
TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")


def load_tokenizer(config):
    """The tokenizer of config.model_path, or the built-in bytes. A tokenizer without a pad token pads with EOS."""
    if not config.model_path:
        return byte_tokenizer()
    check_model_folder(config.model_path, config.trust_remote_code)
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.model_path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"--model_path={config.model_path}: no tokenizer: {first_line(error)}") from None
    if tokenizer.eos_token_id is None:
        raise ValueError(f"--model_path={config.model_path}: its tokenizer has no eos_token, so completions could not end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token         # harmless: masks come from positions, never from ids
    return tokenizer


def load_policy(config):
    """(model, tokenizer): config.model_path, a folder or a hub id, or the built-in tiny Gemma if it is empty.

    Weights are float32, whatever the precision of the layers: in bfloat16 a step of 1e-6 would be rounded away. The model is
    in evaluation mode and stays there: with dropout, ratios would not be 1 on the first step.

    config  has model_path, attn_implementation, precision, trust_remote_code
    raises  ValueError in one line if there is no such model
    """
    tokenizer = load_tokenizer(config)
    if not config.model_path:
        return with_precision(tiny_gemma(tokenizer, config.attn_implementation).eval(), config.precision), tokenizer
    try:
        model = AutoModelForCausalLM.from_pretrained(
            config.model_path, dtype=torch.float32, attn_implementation=config.attn_implementation,
            trust_remote_code=config.trust_remote_code,
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"--model_path={config.model_path}: cannot be loaded: {first_line(error)}") from None
    return with_precision(model, config.precision), tokenizer


def with_precision(model: PreTrainedModel, precision: str) -> PreTrainedModel:
    """The model with layers that compute in bfloat16, if asked for. Its head is not one of them."""
    if precision == "bfloat16":
        model.base_model.forward = partial(in_bfloat16, model.base_model.forward)
    return model


def in_bfloat16(forward, *args, **kwargs):
    """Call a model's own forward under autocast, on the device where the model is then."""
    with torch.autocast(forward.__self__.device.type, dtype=torch.bfloat16):
        return forward(*args, **kwargs)


def computes_in_bfloat16(model: PreTrainedModel) -> bool:
    """Whether with_precision made it so."""
    return getattr(model.base_model.forward, "func", None) is in_bfloat16


def recompute_activations(model: PreTrainedModel) -> None:
    """Keep only what goes into each layer, and forward the layer again in the backward pass.

    transformers has a switch for it that works in training mode alone, and so with dropout.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(f"--gradient_checkpointing=True: {type(model).__name__} has no layers made for it; leave it out")
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def move(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """The model on a device. On the way to or from XLA every parameter is made anew, so shared ones have to be tied again."""
    model.to(device)
    if isinstance(model, PreTrainedModel):
        model.tie_weights()
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        tied = model.config.get_text_config().tie_word_embeddings
        assert not tied or head.weight is embedding.weight, "head and embedding were one parameter and are two after the move"
    shard_weights(model)
    return model


def check_model_folder(path: str, trust_remote_code: bool) -> None:
    """Whether a local folder holds what a model needs, said before anything slow happens. Hub ids pass."""
    folder = Path(path)
    if not folder.exists():
        if path.count("/") != 1 or path.startswith((".", "/")):
            raise ValueError(f"--model_path={path}: no such folder")
        return
    needs = {
        "config.json": ["config.json"],
        "weights (model.safetensors)": ["*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin"],
        "a tokenizer (tokenizer.json)": ["tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json"],
    }
    for what, patterns in needs.items():
        if not any(any(folder.glob(pattern)) for pattern in patterns):
            raise ValueError(f"--model_path={path}: the folder has no {what}; point it at a saved model, such as RUN/final")
    try:
        AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"--model_path={path}: config.json is unusable: {first_line(error)}") from None


def first_line(error: Exception) -> str:
    """The first line of a long message."""
    return str(error).strip().splitlines()[0]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte of UTF-8, one for each tag, and pad, EOS, BOS: any text can be written with it."""
    special = ["<pad>", "<eos>", "<bos>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*special, *alphabet])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    fast.add_tokens(list(TAGS))                           # ordinary tokens, so that decoding shows them
    return fast


def tiny_gemma(tokenizer, attn_implementation: str = "sdpa") -> Gemma3ForCausalLM:
    """A Gemma 3 of a million parameters with random weights: every second layer slides over 64 tokens."""
    config = Gemma3TextConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, query_pre_attn_scalar=32, sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2, max_position_embeddings=4096,
        initializer_range=128**-0.5,                      # at 0.02 so narrow a model needs twice as many steps
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id,
        attn_implementation=attn_implementation,
    )
    return Gemma3ForCausalLM(config)


def frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A reference: the model as it is now, without gradients, in evaluation mode."""
    reference = copy.deepcopy(model).eval()
    return reference.requires_grad_(False)


@torch.no_grad()
def update_reference(reference: PreTrainedModel, model: PreTrainedModel, alpha: float) -> None:
    """reference = alpha * reference + (1 - alpha) * policy; alpha=0 copies the policy exactly."""
    for kept, new in zip(reference.parameters(), model.parameters(), strict=True):
        kept.lerp_(new.to(kept.device), 1 - alpha) if alpha else kept.copy_(new)


@contextmanager
def moved_to(model: PreTrainedModel, device: torch.device):
    """The model on a device for a while, and back where it was afterwards."""
    home = next(model.parameters()).device
    try:
        yield model if home == device else move(model, device)
    finally:
        if home != device:
            move(model, home)


class ValueHead(torch.nn.Module):
    """The reward to expect before a token, from the hidden state that predicts it: (N, H) -> (N,) points.

    Starts at 0 everywhere. No dropout: values at sampling time and in training must come from the same function.
    """

    def __init__(self, hidden_size: int):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.LayerNorm(hidden_size), torch.nn.Linear(hidden_size, hidden_size), torch.nn.ReLU(),
            torch.nn.Linear(hidden_size, 1),
        )
        torch.nn.init.zeros_(self.layers[-1].weight)
        torch.nn.init.zeros_(self.layers[-1].bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.layers(hidden.to(self.layers[-1].weight.dtype))[:, 0]


def save_policy(model: PreTrainedModel, tokenizer, folder: Path) -> None:
    """Write a folder that AutoModelForCausalLM and AutoTokenizer load."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
