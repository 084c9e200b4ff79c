"""
Estimates of the tokens and the memory of a step, printed before the first one.

The memory estimate is for the worst case, in which every completion reaches the length limit. Activations are
not derived from the architecture but measured: the tensors that autograd keeps of one small forward pass.
"""

import os

import torch
from torch.autograd.graph import saved_tensors_hooks

from config import Config
from data import encode_prompt
from engine.chunked_head import LOGITS_AT_ONCE, TOKENS_AT_ONCE
from engine.devices import peak_memory_gb
from engine.packing import pack_rows
from engine.sharding import bytes_here, gathered_weights, local
from logprobs import completion_log_probs
from engine.recomputation import layers_of
from model import has_adapter, precision_of, trainable_parameters
from runs.startup_check import random_rollout


def describe_step(
    model, tokenizer, examples: list[dict], config: Config, *, longest_prompt: int, shared_prompt: bool
) -> list[str]:
    """Return lines for the console about a GRPO step.

    examples        a few, to measure activations with
    longest_prompt  in tokens
    """
    training, prompts = config.training, config.training.batch_size
    group_size, limit = config.grpo.num_completions_per_prompt, config.grpo.generation_max_length
    completions = group_size * limit if shared_prompt else group_size * (longest_prompt + limit)
    tokens = prompts * (longest_prompt * shared_prompt + completions)
    num_passes = -(-tokens // training.max_tokens_per_forward)
    work = (
        f"a step: {prompts} prompts of up to {longest_prompt} tokens x {group_size} = {prompts * group_size} "
        f"completions of up to {limit}; {tokens} tokens at most, in {num_passes} "
        f"pass{'es' * (num_passes > 1)}"
    )
    if model.device.type == "xla":                        # plans its memory at compilation
        return [work]
    pass_tokens = min(tokens, max(training.max_tokens_per_forward, longest_prompt + limit))
    token_bytes = activation_bytes(model, tokenizer, examples, training.gradient_checkpointing, shared_prompt)
    cache_tokens = longest_prompt / (group_size if shared_prompt else 1) + limit             # of a completion
    sizes = memory_gb(model, config, pass_tokens * token_bytes, cache_tokens)
    alternating = {name: sizes.pop(name) for name in ("training pass", "sampling cache")}
    total, available = sum(sizes.values()) + max(alternating.values()), available_gb(model.device)
    table = ", ".join(f"{name} {size:.2g}" for name, size in (sizes | alternating).items() if size >= 0.005)
    memory = f"memory: about {total:.2g} of {available:.2g} GB at most ({table}; pass and cache alternate)"
    if total > 0.9 * available:
        memory += (
            "; if it runs out: --gradient_checkpointing, lower --max_tokens_per_forward or "
            "--generation_batch_size"
        )
    return [work, memory]


def memory_gb(model, config: Config, activations: float, cache_tokens: float) -> dict[str, float]:
    """Return the memory of a run by purpose, in 10^9 bytes.

    activations   bytes of a training pass
    cache_tokens  tokens of a completion in the cache, with its share of the prompt
    """
    architecture = model.config.get_text_config()
    weights = sum(map(bytes_here, model.parameters()))
    trainable = sum(map(bytes_here, trainable_parameters(model)))
    on_other_ranks = sum(p.numel() * p.element_size() for p in model.parameters()) - weights
    head = model.get_output_embeddings().weight
    num_rows = config.training.batch_size * config.grpo.num_completions_per_prompt
    num_rows = config.grpo.generation_batch_size or num_rows
    num_heads = architecture.num_attention_heads
    width = getattr(architecture, "head_dim", None) or architecture.hidden_size // num_heads
    width *= getattr(architecture, "num_key_value_heads", None) or num_heads     # of the keys of a token
    logits = 3 * max(LOGITS_AT_ONCE, TOKENS_AT_ONCE * len(head)) * 4      # logits, probabilities, gradient
    embedding_gradient = head.numel() * 4                                 # before it is accumulated
    size = 4 if precision_of(model) == "float32" else 2                   # bytes of a number in the cache
    libraries = peak_memory_gb(model.device) - weights / 1e9
    return {
        "libraries": max(0.0, libraries) if model.device.type == "cpu" else 0.0,
        "weights": weights / 1e9, "gradients": trainable / 1e9, "AdamW": 2 * trainable / 1e9,
        "reference": (trainable if has_adapter(model) else weights) / 1e9 if config.grpo.kl_coef else 0.0,
        "training pass": (activations + logits + embedding_gradient) / 1e9,
        # Keys and values, two copies while they are compacted, and gathered weights.
        "sampling cache": (
            2 * num_rows * cache_tokens * 2 * width * architecture.num_hidden_layers * size + on_other_ranks
        ) / 1e9,
    }


def activation_bytes(model, tokenizer, examples: list[dict], recompute: bool, shared_prompt: bool) -> float:
    """Return the bytes that autograd keeps for a token of a forward pass.

    recompute  --gradient_checkpointing: count one layer, and only the inputs of the others
    """
    prompts = [encode_prompt(tokenizer, example["prompt"]) for example in examples]
    rollout = random_rollout(model, tokenizer, prompts)
    kept: dict[int, int] = {}
    recomputed = layers_of(model)[:1] if recompute else []

    def count(tensor):
        storage = local(tensor).untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with gathered_weights(model), saved_tensors_hooks(count, lambda tensor: tensor):
        weights = {local(p).untyped_storage().data_ptr() for p in model.parameters()}
        wrapped = [layer.forward for layer in recomputed]
        try:
            for layer in recomputed:
                layer.forward = layer.forward.args[0]     # what recompute_activations wrapped
            result = completion_log_probs(model, rollout, shared_prompt=shared_prompt)
        finally:
            for layer, forward in zip(recomputed, wrapped, strict=True):
                layer.forward = forward
    del result                                            # not earlier, so that no address was used twice
    packed = pack_rows(rollout, torch.arange(len(rollout.completions)), shared_prompt)
    return sum(kept.values()) / packed.ids.numel()


def available_gb(device: torch.device) -> float:
    """Return the memory of the device in 10^9 bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / 1e9
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
