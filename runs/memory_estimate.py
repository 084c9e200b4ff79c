"""
Estimates of the tokens and the memory of a step, before any weights are loaded, and flags that follow them.

    python train.py --use_grpo --estimate --model_path FOLDER_OR_ID --memory_gb 24 --mesh fsdp=8

They are for the worst case, in which every completion reaches the length limit. Weights, gradients, AdamW's
state and the reference are counted; sampling and a training pass are formulas (activations.py).
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from itertools import product

import torch
from transformers import AutoConfig

from config import Config, ModelConfig
from engine.adapters import add_adapter, has_adapter, trainable_parameters
from engine.devices import available_gb, best_device
from engine.errors import first_line
from engine.model_files import adapter_settings, attention_options, auto_class, check_model_path
from engine.precision import matrices_of_layers, precision_of, with_precision
from engine.recomputation import layers_of
from engine.text_model import freeze_towers, text_model
from model import byte_tokenizer, tiny_gemma
from runs.activations import pass_bytes, sampling_bytes

FULL = 0.9                      # use at most this share of the memory: fragments and CUDA's context need some
PASS_TOKENS = 8192, 4096, 2048  # defaults of --max_tokens_per_forward on an accelerator, the best one first
# A pass takes this many times its bytes of a CPU's heap. glibc cannot reuse every freed block for an aligned
# one of the same size, and an adapter's passes free many between the tensors that they keep.
FRAGMENTS, FRAGMENTS_WITH_ADAPTER = 1.1, 1.8
HEAP = 5e8                      # bytes that passes on a CPU took beyond that, as measured (docs/scale.md)


@lru_cache(maxsize=8)
def model_shapes(config: ModelConfig, tp: int):
    """Return the model of a configuration on the meta device: shapes without values.

    tp      number of processes that divide the matrices of every layer; these are the shapes of one
    raises  ValueError in one line if there is no usable config.json
    """
    adapter = adapter_settings(config.model_path)
    path = adapter.get("base_model_name_or_path", config.model_path)
    trust, options = dict(trust_remote_code=config.trust_remote_code), attention_options(config)
    if path:
        check_model_path(config.model_path, config_only=True)
    try:
        with torch.device("meta"):
            settings = tiny_gemma(byte_tokenizer()).config
            settings = AutoConfig.from_pretrained(path, **trust) if path else settings
            divide(settings.get_text_config(), tp)
            model = auto_class(settings).from_config(settings, dtype=torch.float32, **trust, **options)
            freeze_towers(model)
            if rank := adapter.get("r", config.lora_rank):
                add_adapter(model, replace(config, lora_rank=rank), False)
            return with_precision(model.eval(), config.precision)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"--model_path={path}: no usable config.json: {first_line(error)}") from None


def divide(text_config, tp: int) -> None:
    """Give a process its share of the heads and columns, as parallelize_layers in engine/sharding.py does."""
    if tp > 1:
        heads = text_config.num_attention_heads
        text_config.head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
        for name in "num_attention_heads", "num_key_value_heads", "intermediate_size":
            setattr(text_config, name, getattr(text_config, name) // tp)


def step_tokens(config: Config, longest_prompt: int, shared_prompt: bool) -> int:
    """Return the tokens of a step, at most; demonstrations have the limit of completions."""
    size = config.grpo.num_completions_per_prompt if config.training.use_grpo else 1
    prompt_tokens = longest_prompt * (1 if shared_prompt else size)
    return config.training.batch_size * (prompt_tokens + size * config.grpo.generation_max_length)


def memory_gb(
    config: Config, longest_prompt: int, mesh: dict[str, int], shared_prompt: bool = True
) -> dict[str, float]:
    """Return the memory of a process by purpose, in 10^9 bytes, and in all: at the peak.

    longest_prompt  in tokens;  mesh  as parse_mesh returns it
    """
    training, grpo, limit = config.training, config.grpo, config.grpo.generation_max_length
    shards, slices = mesh["fsdp"], mesh["replicate"] * mesh["fsdp"]
    model = model_shapes(config.model, mesh["tp"])
    text_config, layers = model.config.get_text_config(), layers_of(text_model(model))
    types, width = getattr(text_config, "layer_types", None) or [], text_config.hidden_size
    if set(types) - {"full_attention", "sliding_attention"}:      # some carry state from token to token
        shared_prompt = False
    weights, trained = num_bytes(model.parameters()), num_bytes(trainable_parameters(model))
    value_head = 4 * (width**2 + 4 * width + 1) if training.use_grpo and grpo.use_value_head else 0
    layer_weights = [num_bytes(layer.parameters()) for layer in layers]
    # Weights outside the layers stay gathered in a pass. Of layers there are two, and the gradient of one.
    gathered = weights - sum(layer_weights) + 3 * max(layer_weights) if shards > 1 else 0
    tokens = math.ceil(step_tokens(config, longest_prompt, shared_prompt) / slices)
    tokens = min(tokens, max(training.max_tokens_per_forward, longest_prompt + limit))
    row_length = 0 if shared_prompt else longest_prompt + limit
    training_pass = pass_bytes(model, tokens, training.gradient_checkpointing, row_length)
    if not training.memory_gb and best_device(config.model.device).type == "cpu":
        fragments = FRAGMENTS_WITH_ADAPTER if has_adapter(model) else FRAGMENTS
        training_pass = fragments * training_pass + HEAP
    prompts = math.ceil(training.batch_size / slices)
    if grpo.generation_batch_size:
        prompts = min(prompts, max(1, grpo.generation_batch_size // grpo.num_completions_per_prompt))
    rows = prompts * grpo.num_completions_per_prompt
    # An evaluation samples one completion of each prompt, so more prompts at once.
    prompts = max(prompts, min(rows, math.ceil(config.data.eval_limit / slices)))
    sampling = engine_bytes(config) or sampling_bytes(
        model, prompts, rows, longest_prompt, limit, shared_prompt)
    sizes = {
        "weights": weights / shards + value_head,
        "AdamW": trained / shards * (0.51 if training.adam_8bit else 2) + 2 * value_head,
        "reference": reference_bytes(config, model) / shards,
        "gradients": trained / shards + value_head,
        "training pass": training_pass + gathered,
        "sampling": sampling + weights * (shards > 1),
    }
    always = sizes["weights"] + sizes["AdamW"] + sizes["reference"]
    sizes["in all"] = always + max(sizes["gradients"] + sizes["training pass"], sizes["sampling"])
    return {name: size / 1e9 for name, size in sizes.items()}


def engine_bytes(config: Config) -> float:
    """Return the bytes of a GPU that vLLM takes while it samples; 0 if it does not, or without a GPU."""
    if config.grpo.engine != "vllm":
        return 0
    device, memory = best_device(config.model.device), config.training.memory_gb
    memory = memory or available_gb(device) * (device.type == "cuda")
    return config.grpo.engine_memory * memory * 1e9


def reference_bytes(config: Config, model) -> int:
    """Return the bytes of the reference on the device between its passes, undivided."""
    if not config.training.use_grpo or not config.grpo.kl_coef or config.grpo.reference_offload:
        return 0
    if has_adapter(model):
        return num_bytes(trainable_parameters(model))
    exact = config.grpo.reference_mode == "ema" or precision_of(model) == "float32"
    small = [] if exact else [weight for _, _, weight in matrices_of_layers(model)]
    return num_bytes(model.parameters()) - 2 * sum(parameter.numel() for parameter in small)


def num_bytes(parameters: Iterable) -> int:
    """Return the bytes of all parameters."""
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def resolve_memory_settings(
    config: Config, device: str, longest_prompt: int, mesh: dict[str, int], memory: float
) -> Config:
    """Return the configuration with max_tokens_per_forward and gradient_checkpointing, where not given.

    On an accelerator they are the longest passes that fit without recomputation, else with it; if none fits,
    those that need least. On a CPU or XLA they are constants.
    device  its type;  memory  of the device, in 10^9 bytes
    """
    training = config.training
    tokens, recompute = training.max_tokens_per_forward, training.gradient_checkpointing
    sizes = {"cpu": [2048], "xla": [8192]}.get(device, PASS_TOKENS)
    sizes = [tokens] if tokens else [max(size, 2 * longest_prompt) for size in sizes]
    choose = device not in ("cpu", "xla") and not recompute and "gradient_checkpointing" not in training.given
    settings = product([False, True] if choose else [recompute], dict.fromkeys(sizes))
    choices = [
        replace(config, training=replace(
            training, gradient_checkpointing=switch, max_tokens_per_forward=size))
        for switch, size in settings
    ]
    if len(choices) == 1:
        return choices[0]
    try:
        needed = [memory_gb(choice, longest_prompt, mesh)["in all"] for choice in choices]
    except Exception:                                     # not every architecture has an estimate
        return choices[0]
    fitting = [choice for choice, gb in zip(choices, needed, strict=True) if gb <= FULL * memory]
    return fitting[0] if fitting else choices[needed.index(min(needed))]


def describe_step(
    config: Config, *, longest_prompt: int, shared_prompt: bool, mesh: dict[str, int], memory: float,
    libraries: float = 0.0,
) -> list[str]:
    """Return lines for the console about a step.

    memory     of the device, in 10^9 bytes; 0: not estimated, because XLA plans its memory at compilation
    libraries  part of it that Python and its libraries take
    """
    training, prompts = config.training, config.training.batch_size
    size, limit = config.grpo.num_completions_per_prompt, config.grpo.generation_max_length
    tokens = step_tokens(config, longest_prompt, shared_prompt)
    num_passes = math.ceil(tokens / training.max_tokens_per_forward)
    lines = [
        f"a step: {prompts} prompts of up to {longest_prompt} tokens x {size} = {prompts * size} completions "
        f"of up to {limit}; {tokens} tokens at most, in {num_passes} pass{'es' * (num_passes > 1)}"
    ] if training.use_grpo else []
    if not memory:
        return lines
    try:
        sizes = memory_gb(config, longest_prompt, mesh, shared_prompt)
    except Exception as error:
        return [*lines, f"memory: no estimate for this model: {first_line(error)}"]
    total = sizes.pop("in all") + libraries
    sizes = {"libraries": libraries} | sizes
    table = ", ".join(f"{name} {size:.2g}" for name, size in sizes.items() if size >= 0.005)
    line = (
        f"memory: about {total:.3g} of {memory:.3g} GB at most ({table}; gradients and training pass "
        "alternate with sampling)"
    )
    if total > FULL * memory:
        line += (
            "; if it runs out: --gradient_checkpointing, lower --max_tokens_per_forward or "
            "--generation_batch_size"
        )
    return [*lines, line]


def less_memory(config: Config) -> str:
    """Return flags with which a step of these settings takes less memory."""
    training, grpo = config.training, config.grpo
    flags = f"--max_tokens_per_forward {max(1, training.max_tokens_per_forward // 2)}"
    if not training.gradient_checkpointing:
        flags += " --gradient_checkpointing"
    if training.use_grpo:
        half = (grpo.generation_batch_size or config.rollout_size) // 2
        flags += f" --generation_batch_size {max(grpo.num_completions_per_prompt, half)}"
    return flags
