"""
Estimates of tokens and memory of a step, printed before the first one.

The memory estimate is for the worst case, in which every completion reaches the length limit. Activations are not derived from
the architecture but counted: one small forward pass, and every tensor that autograd keeps of it.
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
from model import has_adapter, layers_of, precision_of, trainable_parameters
from runs.startup_check import random_rollout


def describe_step(
    model, tokenizer, examples: list[dict], config: Config, *, longest_prompt: int, shared_prompt: bool
) -> list[str]:
    """Return lines for the console about a GRPO step. examples: some to count activations on; longest_prompt: tokens."""
    training, prompts = config.training, config.training.batch_size
    group_size, limit = config.grpo.num_completions_per_prompt, config.grpo.generation_max_length
    completions = group_size * limit if shared_prompt else group_size * (longest_prompt + limit)
    tokens = prompts * (longest_prompt * shared_prompt + completions)
    passes = -(-tokens // training.max_tokens_per_forward)
    work = (
        f"a step: {prompts} prompts of up to {longest_prompt} tokens x {group_size} = {prompts * group_size} completions "
        f"of up to {limit}; {tokens} tokens at most, in {passes} pass{'es' * (passes > 1)}"
    )
    if model.device.type == "xla":                        # plans memory when it compiles, and raises if it is too little
        return [work]
    pass_tokens = min(tokens, max(training.max_tokens_per_forward, longest_prompt + limit))
    token_bytes = activation_bytes(model, tokenizer, examples, training.gradient_checkpointing, shared_prompt)
    columns = longest_prompt / (group_size if shared_prompt else 1) + limit      # of the cache, for each completion
    parts = memory_gb(model, config, pass_tokens * token_bytes, columns)
    in_turns = {name: parts.pop(name) for name in ("training pass", "sampling cache")}
    total, available = sum(parts.values()) + max(in_turns.values()), available_gb(model.device)
    named = ", ".join(f"{name} {size:.2g}" for name, size in (parts | in_turns).items() if size >= 0.005)
    memory = f"memory: about {total:.2g} of {available:.2g} GB at the worst ({named}; pass and cache take turns)"
    if total > 0.9 * available:
        memory += "; if it runs out: --gradient_checkpointing, lower --max_tokens_per_forward or --generation_batch_size"
    return [work, memory]


def memory_gb(model, config: Config, activations: float, columns: float) -> dict[str, float]:
    """Return the memory of a run by purpose, in 10^9 bytes. activations: bytes of a pass; columns of a row of the cache."""
    architecture = model.config.get_text_config()
    weights, trainable = (sum(map(bytes_here, group)) for group in (model.parameters(), trainable_parameters(model)))
    on_other_ranks = sum(p.numel() * p.element_size() for p in model.parameters()) - weights
    head = model.get_output_embeddings().weight
    rows = config.grpo.generation_batch_size or config.training.batch_size * config.grpo.num_completions_per_prompt
    heads = getattr(architecture, "num_key_value_heads", None) or architecture.num_attention_heads
    width = getattr(architecture, "head_dim", None) or architecture.hidden_size // architecture.num_attention_heads
    logits = 3 * max(LOGITS_AT_ONCE, TOKENS_AT_ONCE * len(head)) * 4             # logits, probabilities, gradient
    embedding_gradient = head.numel() * 4                                        # before it is accumulated
    size = 4 if precision_of(model) == "float32" else 2                          # bytes of a number in the cache
    libraries = peak_memory_gb(model.device) - weights / 1e9
    return {
        "libraries": max(0.0, libraries) if model.device.type == "cpu" else 0.0,
        "weights": weights / 1e9, "gradients": trainable / 1e9, "AdamW": 2 * trainable / 1e9,
        "reference": (trainable if has_adapter(model) else weights) / 1e9 if config.grpo.kl_coef else 0.0,
        "training pass": (activations + logits + embedding_gradient) / 1e9,
        # Keys and values, twice while they are compacted, and gathered weights.
        "sampling cache": (
            2 * rows * columns * 2 * heads * width * architecture.num_hidden_layers * size + on_other_ranks
        ) / 1e9,
    }


def activation_bytes(model, tokenizer, examples: list[dict], recompute: bool, shared_prompt: bool) -> float:
    """Count the bytes that autograd keeps for a token of a pass; with recompute, of one layer and the inputs of the others."""
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
    del result                                            # kept until here, so that no address was used twice
    return sum(kept.values()) / pack_rows(rollout, torch.arange(len(rollout.completions)), shared_prompt).ids.numel()


def available_gb(device: torch.device) -> float:
    """Return the memory of the device in 10^9 bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / 1e9
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
