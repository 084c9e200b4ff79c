"""
Estimates of the tokens and the memory of a step, before any weights are loaded, and flags that follow them.

    python train.py --use_grpo --estimate --model_path FOLDER_OR_ID --memory_gb 24 --mesh fsdp=8

They are for the worst case, in which every completion reaches the length limit. Weights, gradients, AdamW's
state and the reference are counted; sampling and a training pass are simulated (simulated_memory.py).
"""

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from itertools import product

from config import Config, TrainingConfig
from engine.adapters import has_adapter, trainable_parameters
from engine.devices import available_gb, best_device
from engine.errors import first_line
from engine.recomputation import layers_of
from engine.precision import matrices_of_layers, precision_of
from runs.simulated_memory import FakePolicy

logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)     # exceptions are enough

FULL = 0.9                      # use at most this share of the memory: fragments and CUDA's context need some
PASS_TOKENS = 8192, 4096, 2048  # defaults of --max_tokens_per_forward on an accelerator, the best one first
fake_policy = lru_cache(maxsize=8)(FakePolicy)


@lru_cache(maxsize=64)
def pass_bytes(
    model_config, recompute: bool, tp: int, tokens: int, shared_prompt: bool, policy: tuple
) -> int:
    """Return FakePolicy.pass_bytes, or the result of the same call before."""
    return fake_policy(model_config, recompute, tp).pass_bytes(tokens, shared_prompt, dict(policy))


@lru_cache(maxsize=64)
def sampling_bytes(
    model_config, recompute: bool, tp: int, prompts: int, size: int, longest: int, limit: int,
    shared_prompt: bool, policy: tuple,
) -> int:
    """Return FakePolicy.sampling_bytes, or the result of the same call before."""
    fake = fake_policy(model_config, recompute, tp)
    return fake.sampling_bytes(prompts, size, longest, limit, shared_prompt, dict(policy))


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
    try:
        return memory_of_process(config, longest_prompt, mesh, shared_prompt)
    except AssertionError:                                # of check_layers: some carry state, so plain rows
        return memory_of_process(config, longest_prompt, mesh, False)


def memory_of_process(
    config: Config, longest_prompt: int, mesh: dict[str, int], shared_prompt: bool
) -> dict[str, float]:
    """Return memory_gb for passes that are packed (shared_prompt) or plain."""
    training, grpo, limit = config.training, config.grpo, config.grpo.generation_max_length
    shards, slices = mesh["fsdp"], mesh["replicate"] * mesh["fsdp"]
    shapes = config.model, training.gradient_checkpointing, mesh["tp"]
    policy = fake_policy(*shapes)
    model, width = policy.model, policy.model.config.get_text_config().hidden_size
    weights, trained = num_bytes(model.parameters()), num_bytes(trainable_parameters(model))
    value_head = 4 * (width**2 + 4 * width + 1) if training.use_grpo and grpo.use_value_head else 0
    layers = [num_bytes(layer.parameters()) for layer in layers_of(model)]
    # Weights outside the layers stay gathered in a pass. Of layers there are two, and the gradient of one.
    gathered = weights - sum(layers) + 3 * max(layers, default=0) if shards > 1 else 0
    tokens = math.ceil(step_tokens(config, longest_prompt, shared_prompt) / slices)
    tokens = min(tokens, max(training.max_tokens_per_forward, longest_prompt + limit))
    prompts = math.ceil(training.batch_size / slices)
    if grpo.generation_batch_size:
        prompts = min(prompts, grpo.generation_batch_size // grpo.num_completions_per_prompt)
    distribution = tuple((grpo if training.use_grpo else grpo.supervised).policy.items())
    sizes = {
        "weights": weights / shards + value_head,
        "AdamW": trained / shards * (0.51 if training.adam_8bit else 2) + 2 * value_head,
        "reference": reference_bytes(config, model) / shards,
        "gradients": trained / shards + value_head,
        "training pass": pass_bytes(*shapes, tokens, shared_prompt, distribution) + gathered,
        "sampling": weights * (shards > 1) + (engine_bytes(config) or sampling_bytes(
            *shapes, prompts, grpo.num_completions_per_prompt, longest_prompt, limit, shared_prompt,
            tuple(grpo.policy.items()))),
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


def choose_memory_settings(
    training: TrainingConfig, longest_prompt: int, estimate: Callable[[TrainingConfig], float], memory: float
) -> TrainingConfig:
    """Return max_tokens_per_forward and gradient_checkpointing, unless they were given, such that a run fits.

    The longest passes that fit without recomputation, else with it; if none fits, those that need least.
    estimate  gigabytes with these settings;  memory  gigabytes
    """
    tokens, recompute = training.max_tokens_per_forward, training.gradient_checkpointing
    sizes = [tokens] if tokens else [max(size, 2 * longest_prompt) for size in PASS_TOKENS]
    switches = [recompute] if recompute or "gradient_checkpointing" in training.given else [False, True]
    choices = [
        replace(training, gradient_checkpointing=switch, max_tokens_per_forward=size)
        for switch, size in product(switches, dict.fromkeys(sizes))
    ]
    needed = []
    for choice in choices:
        needed.append(estimate(choice))
        if needed[-1] <= FULL * memory:
            return choice
    return choices[needed.index(min(needed))]


def resolve_memory_settings(
    config: Config, device: str, longest_prompt: int, mesh: dict[str, int], memory: float
) -> Config:
    """Return the configuration with the result of choose_memory_settings; with constants on a CPU or XLA.

    device  its type;  memory  of the device, in 10^9 bytes
    """
    training = config.training
    if device in ("cpu", "xla"):
        default = max(2048 if device == "cpu" else 8192, 2 * longest_prompt)
        training = replace(training, max_tokens_per_forward=training.max_tokens_per_forward or default)
        return replace(config, training=training)

    def estimate(training: TrainingConfig) -> float:
        try:
            return memory_gb(replace(config, training=training), longest_prompt, mesh)["in all"]
        except Exception:                                 # not every architecture runs on fake tensors
            return math.inf

    return replace(config, training=choose_memory_settings(training, longest_prompt, estimate, memory))


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
