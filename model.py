"""
The policy: loading any causal language model that transformers knows, the built-in tiny Gemma, LoRA adapters (peft),
references, the value head, saving.

Weights are read and written as safetensors. Left out on purpose: quantised weights.
"""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig, AutoModelForCausalLM, AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging

from engine.devices import is_main
from engine.prefix_attention import use_prefix_attention
from engine.sharding import gathered_weights, reshard, shard, shard_weights, full_tensor

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

    config  a ModelConfig. With lora_rank the weights are frozen and an adapter is trained; a model_path that is the folder
            of an adapter brings its own
    raises  ValueError in one line if there is no such model
    """
    tokenizer = load_tokenizer(config)
    adapter = adapter_settings(config.model_path)
    if adapter and config.lora_rank not in (0, adapter["r"]):
        raise ValueError(f"--lora_rank={config.lora_rank}: the adapter in {config.model_path} has {adapter['r']}; leave it out")
    try:
        model = tiny_gemma(tokenizer, config.attn_implementation).eval() if not config.model_path else (
            AutoModelForCausalLM.from_pretrained(
                adapter.get("base_model_name_or_path", config.model_path), dtype=torch.float32,
                attn_implementation=config.attn_implementation, trust_remote_code=config.trust_remote_code,
            )
        )
        if adapter:
            model.load_adapter(config.model_path, is_trainable=True)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"--model_path={config.model_path}: cannot be loaded: {first_line(error)}") from None
    if config.lora_rank and not adapter:
        model.add_adapter(LoraConfig(
            r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM"
        ))
    return with_precision(model, config.precision), tokenizer


def adapter_settings(path: str) -> dict:
    """adapter_config.json of a folder that holds an adapter; {} of any other."""
    file = Path(path) / "adapter_config.json"
    return json.loads(file.read_text()) if path and file.exists() else {}


def with_precision(model: PreTrainedModel, precision: str) -> PreTrainedModel:
    """The model with layers that compute in bfloat16 or float16, if asked for. Its head is not one of them."""
    model.precision = precision
    if precision != "float32":
        model.base_model.forward = partial(under_autocast, getattr(torch, precision), model.base_model.forward)
    return model


def under_autocast(dtype: torch.dtype, forward, *args, **kwargs):
    """Call a model's own forward under autocast, on the device where the model is then."""
    with torch.autocast(forward.__self__.device.type, dtype=dtype):
        return forward(*args, **kwargs)


def precision_of(model: PreTrainedModel) -> str:
    """What with_precision made it."""
    return getattr(model, "precision", "float32")


def layers_of(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The layers, as transformers marks them."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def trainable_parameters(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    """The parameters that training changes: all of them, or the adapter's."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def recompute_activations(model: PreTrainedModel) -> None:
    """Keep only what goes into each layer, and forward the layer again in the backward pass.

    transformers has a switch for it that works in training mode alone, and so with dropout.
    """
    layers = layers_of(model)
    if not layers:
        raise ValueError(f"--gradient_checkpointing=True: {type(model).__name__} has no layers made for it; leave it out")
    def recomputed(forward, *args, **kwargs):
        again = partial(use_prefix_attention, model) if "token_layout" in kwargs else nullcontext
        return checkpoint(
            forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: (nullcontext(), again()), **kwargs
        )

    for layer in layers:
        layer.forward = partial(recomputed, layer.forward)


def move(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """The model on a device. On the way to or from XLA every parameter is made anew, so shared ones have to be tied again."""
    model.to(device)
    if isinstance(model, PreTrainedModel) and not hasattr(model, "mesh"):        # processes have shared it out where it is
        model.tie_weights()
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        tied = model.config.get_text_config().tie_word_embeddings
        assert not tied or head.weight is embedding.weight, "head and embedding were one parameter and are two after the move"
        shard_weights(model)
    return model


def check_model_folder(path: str, trust_remote_code: bool) -> None:
    """Whether a local folder holds what a model needs, said before anything slow happens. Hub ids pass."""
    folder = Path(path)
    if folder.is_file():
        raise ValueError(f"--model_path={path}: is a file; name its folder, {folder.parent}")
    if not folder.exists():
        if path.count("/") != 1 or path.startswith((".", "/")):
            raise ValueError(f"--model_path={path}: no such folder ({folder.absolute()}); ids on the hub look like owner/name")
        return
    if adapter := adapter_settings(path):
        base = adapter["base_model_name_or_path"]
        if not Path(base).exists() and base.count("/") != 1:
            raise ValueError(f"--model_path={path}: is an adapter for {base}, and that is not there")
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


def refuse_too_long(model: PreTrainedModel, longest: int, wanted: int) -> None:
    """Refuse completions that would outgrow the positions that the model knows; longest: prompt; both in tokens."""
    known = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if known and longest + wanted > known:
        raise ValueError(
            f"--generation_max_length={wanted}: with prompts of up to {longest} tokens that exceeds the model's {known} "
            f"positions; at most {max(0, known - longest)}, or shorten the prompts (train.py: --max_prompt_length)"
        )


def first_line(error: Exception) -> str:
    """The first line of a long message."""
    return next(iter(str(error).strip().splitlines()), "")


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


def frozen_copy(model: PreTrainedModel):
    """A reference: the model as it is now, without gradients, in evaluation mode. With an adapter, a copy of that alone."""
    if has_adapter(model):
        return AdapterReference(model)
    if not hasattr(model, "mesh"):
        return copy.deepcopy(model).eval().requires_grad_(False)
    with torch.random.fork_rng(devices=[]):               # its first weights are overwritten: the run's random numbers go on
        reference = AutoModelForCausalLM.from_config(
            model.config, dtype=torch.float32, attn_implementation=model.config._attn_implementation
        )
    reference = with_precision(reference.to(model.device).eval(), precision_of(model))
    shard(reference, layers_of(reference), model.mesh)
    copy_into(reference.parameters(), trainable_parameters(model))
    return reference.requires_grad_(False)


class AdapterReference:
    """The policy with an adapter as it once was, over the same weights. A new adapter adds 0: then it is the bare model."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.kept = [parameter.detach().clone() for parameter in trainable_parameters(model)]

    def parameters(self) -> Iterator[torch.Tensor]:
        return iter(self.kept)

    def base_model(self, **inputs):
        """As the model's, with the kept adapter in the place of the trained one. Without gradient."""
        now = [parameter.detach().clone() for parameter in trainable_parameters(self.model)]
        try:
            copy_into(trainable_parameters(self.model), self.kept)
            return self.model.base_model(**inputs)
        finally:
            copy_into(trainable_parameters(self.model), now)

    def to(self, device) -> "AdapterReference":
        return self

    def __getattr__(self, name: str):
        return getattr(self.model, name)


@torch.no_grad()
def copy_into(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """In place, one after the other."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


@torch.no_grad()
def update_reference(reference, model: PreTrainedModel, alpha: float) -> None:
    """reference = alpha * reference + (1 - alpha) * policy; alpha=0 copies the policy exactly."""
    reshard(model)
    if isinstance(reference, torch.nn.Module):
        reshard(reference)
    for kept, new in zip(reference.parameters(), trainable_parameters(model), strict=True):
        kept.lerp_(new.to(kept.device), 1 - alpha) if alpha else kept.copy_(new)


def follow_policy(reference, model: PreTrainedModel, config, step: int, *, skipped: bool) -> None:
    """Update the reference after an optimiser step, as --reference_mode says. config: GRPOConfig; step of the phase."""
    if config.reference_mode == "ema" and not skipped:
        update_reference(reference, model, config.ema_alpha)
    elif config.reference_mode == "periodic" and step % config.reference_update_freq == 0:
        update_reference(reference, model, 0.0)


# ---- adapters --------------------------------------------------------------------------------------------------------


def has_adapter(model: PreTrainedModel) -> bool:
    """Whether an adapter is trained instead of the weights."""
    return any(isinstance(module, LoraLayer) for module in model.modules())


@contextmanager
def merged_adapter(model: PreTrainedModel):
    """The adapter added to the weights, and the weights bit for bit as they were afterwards: for many passes of few tokens."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    kept = [layer.get_base_layer().weight.detach().clone() for layer in layers]
    try:
        for layer in layers:
            layer.merge()
            layer.get_base_layer().weight.requires_grad_()                       # or autocast would not remember its copy
        yield
    finally:
        for layer in layers:
            layer.unmerge()
            layer.get_base_layer().weight.requires_grad_(False)
        copy_into([layer.get_base_layer().weight for layer in layers], kept)


def merged_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A model of its own, with the adapter added to its weights for good."""
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


# ---- beside the model ------------------------------------------------------------------------------------------------


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


def full_state_dict(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The model's state_dict, gathered where it is sharded. In all processes; whole in the one that writes."""
    reshard(model)
    return {name: full_tensor(tensor) for name, tensor in model.state_dict().items()}


def save_policy(model: PreTrainedModel, tokenizer, folder: Path, weights: dict | None = None) -> None:
    """Write a folder that AutoModelForCausalLM and AutoTokenizer load: with an adapter, that alone, as peft does.

    weights  full_state_dict(model), if they have been gathered already; otherwise all processes have to call this
    """
    weights = full_state_dict(model) if weights is None else weights
    if is_main():
        model.save_pretrained(folder, state_dict=weights)
        tokenizer.save_pretrained(folder)
