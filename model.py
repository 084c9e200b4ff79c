"""
The policy: loading any causal language model that transformers knows, the built-in tiny Gemma, LoRA adapters
(peft), references, the value head, saving.

Weights are read and written as safetensors. Left out on purpose: quantised weights.
"""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoConfig, AutoModelForCausalLM, AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from engine.devices import is_main
from engine.recomputation import layers_of
from engine.sharding import full_tensor, gathered_weights, reshard, shard, shard_weights
from reward_functions.answers import TAGS

logging.disable_progress_bar()                            # a run has one of its own


def load_tokenizer(config):
    """Load the tokenizer of config.model_path, or the built-in one. Without a pad token it pads with EOS."""
    if not config.model_path:
        return byte_tokenizer()
    check_model_folder(config.model_path, config.trust_remote_code)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            config.model_path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"--model_path={config.model_path}: no tokenizer: {first_line(error)}") from None
    if tokenizer.eos_token_id is None:
        raise ValueError(f"--model_path={config.model_path}: its tokenizer needs an eos_token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token         # harmless: masks come from positions, not from ids
    return tokenizer


def load_policy(config):
    """Load the model and the tokenizer of config.model_path, or the built-in ones.

    Weights are float32 at any precision of the layers: in bfloat16 a step of 1e-6 would be rounded away. The
    model is in evaluation mode and stays there: with dropout, ratios would not be 1 on the first step.

    config   a ModelConfig: model_path is a folder, a hub id or empty. With lora_rank, or if the folder holds
             an adapter, the weights are frozen and the adapter is trained
    returns  model, tokenizer
    raises   ValueError in one line if there is no such model
    """
    tokenizer = load_tokenizer(config)
    adapter = adapter_settings(config.model_path)
    if adapter and config.lora_rank not in (0, adapter["r"]):
        raise ValueError(
            f"--lora_rank={config.lora_rank}: the adapter in {config.model_path} has {adapter['r']}; omit it")
    try:
        policy = tiny_gemma(tokenizer, config.attn_implementation).eval() if not config.model_path else (
            AutoModelForCausalLM.from_pretrained(
                adapter.get("base_model_name_or_path", config.model_path), dtype=torch.float32,
                attn_implementation=config.attn_implementation, trust_remote_code=config.trust_remote_code,
            )
        )
        if adapter:
            policy.load_adapter(config.model_path, is_trainable=True)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"--model_path={config.model_path}: cannot be loaded: {first_line(error)}") from None
    if config.lora_rank and not adapter:
        policy.add_adapter(LoraConfig(
            r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules="all-linear",
            task_type="CAUSAL_LM",
        ))
    return with_precision(policy, config.precision), tokenizer


def adapter_settings(path: str) -> dict:
    """Return adapter_config.json of a folder that holds an adapter; {} for any other."""
    file = Path(path) / "adapter_config.json"
    return json.loads(file.read_text()) if path and file.exists() else {}


def with_precision(model: PreTrainedModel, precision: str) -> PreTrainedModel:
    """Let the layers compute in bfloat16 or float16; the head stays in float32. Returns the model."""
    model.precision = precision
    if precision != "float32":
        forward = model.base_model.forward
        model.base_model.forward = partial(under_autocast, getattr(torch, precision), forward)
    return model


def under_autocast(dtype: torch.dtype, forward, *args, **kwargs):
    """Call a method of a model under autocast, on the model's current device."""
    with torch.autocast(forward.__self__.device.type, dtype=dtype):
        return forward(*args, **kwargs)


def precision_of(model: PreTrainedModel) -> str:
    """Return the precision of the layers, as set by with_precision."""
    return getattr(model, "precision", "float32")


def trainable_parameters(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    """Return the parameters that are trained: all of them, or the adapter's."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


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


def check_model_folder(path: str, trust_remote_code: bool) -> None:
    """Raise ValueError if a local folder lacks files of a model. Hub ids are not checked."""
    folder = Path(path)
    if folder.is_file():
        raise ValueError(f"--model_path={path}: is a file; name its folder, {folder.parent}")
    if not folder.exists():
        if path.count("/") != 1 or path.startswith((".", "/")):
            raise ValueError(
                f"--model_path={path}: no such folder ({folder.absolute()}); ids on the hub look like "
                "owner/name")
        return
    if adapter := adapter_settings(path):
        base = adapter["base_model_name_or_path"]
        if not Path(base).exists() and base.count("/") != 1:
            raise ValueError(f"--model_path={path}: is an adapter for {base}, and that is not there")
        return
    required = {
        "config.json": ["config.json"],
        "weights (model.safetensors)": ["*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin"],
        "a tokenizer (tokenizer.json)": [
            "tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json"],
    }
    for name, patterns in required.items():
        if not any(any(folder.glob(pattern)) for pattern in patterns):
            raise ValueError(
                f"--model_path={path}: the folder has no {name}; name a saved model, such as RUN/final")
    try:
        AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"--model_path={path}: config.json is unusable: {first_line(error)}") from None


def check_context_length(model: PreTrainedModel, prompt_tokens: int, completion_tokens: int) -> None:
    """Raise ValueError if the longest prompt and completion together exceed the model's positions."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit and prompt_tokens + completion_tokens > limit:
        raise ValueError(
            f"--generation_max_length={completion_tokens}: with prompts of up to {prompt_tokens} tokens that "
            f"exceeds the model's {limit} positions; at most {max(0, limit - prompt_tokens)}, or shorten the "
            "prompts (train.py: --max_prompt_length)"
        )


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return next(iter(str(error).strip().splitlines()), "")


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


def tiny_gemma(tokenizer, attn_implementation: str = "sdpa") -> Gemma3ForCausalLM:
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


def frozen_copy(model: PreTrainedModel):
    """Return a reference: a copy of the model, or of its adapter alone, without gradients."""
    if has_adapter(model):
        return AdapterReference(model)
    if not hasattr(model, "mesh"):
        return copy.deepcopy(model).eval().requires_grad_(False)
    with torch.random.fork_rng(devices=[]):               # its random weights are overwritten by the policy's
        reference = AutoModelForCausalLM.from_config(
            model.config, dtype=torch.float32, attn_implementation=model.config._attn_implementation
        )
    reference = with_precision(reference.to(model.device).eval(), precision_of(model))
    shard(reference, layers_of(reference), model.mesh)
    copy_into(reference.parameters(), trainable_parameters(model))
    return reference.requires_grad_(False)


class AdapterReference:
    """A reference that shares the policy's weights and keeps a copy of its adapter.

    A new adapter adds 0, so the reference of a new run is the model without an adapter.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.kept = [parameter.detach().clone() for parameter in trainable_parameters(model)]

    def parameters(self) -> Iterator[torch.Tensor]:
        return iter(self.kept)

    def base_model(self, **inputs):
        """Call the model's base_model with the kept adapter in place of the trained one."""
        trained = [parameter.detach().clone() for parameter in trainable_parameters(self.model)]
        try:
            copy_into(trainable_parameters(self.model), self.kept)
            return self.model.base_model(**inputs)
        finally:
            copy_into(trainable_parameters(self.model), trained)

    def to(self, device) -> "AdapterReference":
        return self

    def __getattr__(self, name: str):
        return getattr(self.model, name)


@torch.no_grad()
def copy_into(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source into its target, in place."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


@torch.no_grad()
def update_reference(reference, model: PreTrainedModel, alpha: float) -> None:
    """Set reference = alpha * reference + (1 - alpha) * policy; alpha=0 copies the policy exactly."""
    reshard(model)
    if isinstance(reference, torch.nn.Module):
        reshard(reference)
    for kept, new in zip(reference.parameters(), trainable_parameters(model), strict=True):
        kept.lerp_(new.to(kept.device), 1 - alpha) if alpha else kept.copy_(new)


def follow_policy(reference, model: PreTrainedModel, config, step: int, *, skipped: bool) -> None:
    """Update the reference by --reference_mode, after a step of the phase. config: a GRPOConfig."""
    if config.reference_mode == "ema" and not skipped:
        update_reference(reference, model, config.ema_alpha)
    elif config.reference_mode == "periodic" and step % config.reference_update_freq == 0:
        update_reference(reference, model, 0.0)


# ---- adapters ----------------------------------------------------------------------------------------------


def has_adapter(model: PreTrainedModel) -> bool:
    """Return whether an adapter is trained instead of the weights."""
    return any(isinstance(module, LoraLayer) for module in model.modules())


@contextmanager
def merged_adapter(model: PreTrainedModel):
    """Add the adapter to the weights within the context, for faster sampling; then restore them exactly."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    kept = [layer.get_base_layer().weight.detach().clone() for layer in layers]
    try:
        for layer in layers:
            layer.merge()
            layer.get_base_layer().weight.requires_grad_()             # or autocast would not cache its copy
        yield
    finally:
        for layer in layers:
            layer.unmerge()
            layer.get_base_layer().weight.requires_grad_(False)
        copy_into([layer.get_base_layer().weight for layer in layers], kept)


def merged_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a new model with the adapter added to the weights."""
    with torch.device("meta"):
        merged = AutoModelForCausalLM.from_config(model.config)
    with torch.no_grad(), gathered_weights(model), merged_adapter(model):
        tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
        found = {name.replace(".base_layer", ""): tensor for name, tensor in tensors.items()}
        weights = {name: found[name].detach().cpu().clone() for name in merged.state_dict()}
    merged.load_state_dict(weights, assign=True)
    merged.tie_weights()
    merged.generation_config = model.generation_config
    return merged


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
