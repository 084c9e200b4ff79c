"""
What a step will take, said before it is taken: how many completions, tokens and passes, and how much memory.

Memory is an estimate for the worst case, every completion as long as it may be. What activations take is not computed from the
architecture but counted: one small forward pass, and every tensor that autograd keeps of it.
"""

import os

import torch
from torch.autograd.graph import saved_tensors_hooks

from data import encode_prompt
from engine.chunked_head import LOGITS_AT_ONCE, TOKENS_AT_ONCE
from engine.devices import peak_memory_gb
from engine.packing import pack_rows
from engine.sharding import bytes_here, gathered_weights, local
from logprobs import completion_log_probs
from model import has_adapter, layers_of, precision_of, trainable_parameters
from runs.startup_check import made_up


def describe_step(run) -> list[str]:
    """Lines for the console about a GRPO step of a run."""
    grpo, training = run.config.grpo, run.config.training
    prompts, group_size, limit = training.batch_size, grpo.num_completions_per_prompt, grpo.generation_max_length
    longest = run.longest_prompt
    tokens = prompts * (longest + group_size * limit if run.shared_prompt else group_size * (longest + limit))
    passes = -(-tokens // training.max_tokens_per_forward)
    work = (
        f"a step: {prompts} prompts of up to {longest} tokens x {group_size} = {prompts * group_size} completions of up to "
        f"{limit}; {tokens} tokens at most, in {passes} pass{'es' * (passes > 1)}"
    )
    if run.device.type == "xla":                          # plans memory when it compiles, and says so if it is too little
        return [work]
    pass_tokens = min(tokens, max(training.max_tokens_per_forward, longest + limit))
    parts = memory_gb(run, longest, pass_tokens)
    in_turns = {name: parts.pop(name) for name in ("training pass", "sampling cache")}
    total, there = sum(parts.values()) + max(in_turns.values()), available_gb(run.device)
    named = ", ".join(f"{name} {size:.2g}" for name, size in (parts | in_turns).items() if size >= 0.005)
    memory = f"memory: about {total:.2g} of {there:.2g} GB at the worst ({named}; pass and cache take turns)"
    if total > 0.9 * there:
        memory += "; should it run out: --gradient_checkpointing, lower --max_tokens_per_forward or --generation_batch_size"
    return [work, memory]


def memory_gb(run, longest_prompt: int, pass_tokens: int) -> dict[str, float]:
    """What is in memory, in 10^9 bytes by name, if a pass has pass_tokens tokens."""
    grpo, config = run.config.grpo, run.model.config.get_text_config()
    weights, learned = (sum(map(bytes_here, parameters)) for parameters in (run.model.parameters(), trainable_parameters(run.model)))
    elsewhere = sum(p.numel() * p.element_size() for p in run.model.parameters()) - weights
    head = run.model.get_output_embeddings().weight
    group_size = grpo.num_completions_per_prompt
    rows = grpo.generation_batch_size or run.config.training.batch_size * group_size
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    columns = rows * (longest_prompt / (group_size if run.shared_prompt else 1) + grpo.generation_max_length)
    logits = 3 * max(LOGITS_AT_ONCE, TOKENS_AT_ONCE * len(head)) * 4             # as they are, as probabilities, their gradient
    one_more_gradient = head.numel() * 4                                         # of the embedding, before it is added
    size = 4 if precision_of(run.model) == "float32" else 2                      # bytes of a number in the cache
    python = peak_memory_gb(run.device) - weights / 1e9
    return {
        "libraries": max(0.0, python) if run.device.type == "cpu" else 0.0,
        "weights": weights / 1e9, "gradients": learned / 1e9, "AdamW": 2 * learned / 1e9,
        "reference": (learned if has_adapter(run.model) else weights) / 1e9 if grpo.kl_coef else 0.0,
        "training pass": (pass_tokens * activation_bytes(run) + logits + one_more_gradient) / 1e9,
        # Keys and values, twice while they are rearranged, and what of the weights lies elsewhere.
        "sampling cache": (2 * columns * 2 * heads * width * config.num_hidden_layers * size + elsewhere) / 1e9,
    }


def activation_bytes(run) -> float:
    """What autograd keeps for a token of a pass, counted; of activations that are recomputed, those of one layer at a time."""
    prompts = [encode_prompt(run.tokenizer, example["prompt"]) for example in run.train_set[:2]]
    rollout = made_up(run.model, run.tokenizer, prompts)
    kept: dict[int, int] = {}
    recomputed = layers_of(run.model)[:1] if run.config.training.gradient_checkpointing else []

    def count(tensor):
        storage = local(tensor).untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with gathered_weights(run.model), saved_tensors_hooks(count, lambda tensor: tensor):
        weights = {local(p).untyped_storage().data_ptr() for p in run.model.parameters()}
        wrapped = [layer.forward for layer in recomputed]
        try:
            for layer in recomputed:
                layer.forward = layer.forward.args[0]     # what recompute_activations wrapped
            result = completion_log_probs(run.model, rollout, shared_prompt=run.shared_prompt)
        finally:
            for layer, forward in zip(recomputed, wrapped, strict=True):
                layer.forward = forward
    del result                                            # kept alive until here, so that no address was used twice
    return sum(kept.values()) / pack_rows(rollout, torch.arange(len(rollout.completions)), run.shared_prompt).ids.numel()


def available_gb(device: torch.device) -> float:
    """Memory of the device in 10^9 bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / 1e9
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
