"""Estimate the memory of a run before it begins, and choose how many tokens a forward pass may have."""

import psutil
import torch

from config import Config
from engine.text_model import has_adapter
from logprobs import prompts_and_lengths
from policy import Policy
from sample import Rollout

GB = 10**9                      # as peak_memory_gb in metrics.jsonl
BYTES_OF_LOGIT = 20             # in sampling, of each token of the vocabulary: logit, logp and probability
                                # in float32, and a sum in float64


def activations_of_token(policy: Policy, rollout: Rollout) -> float:
    """Measure the bytes that a forward pass keeps for the backward pass, for each of its tokens.

    A completion of each prompt is forwarded, then one alone: what any pass keeps cancels in the difference.
    """
    model, num_prompts = policy.model, len(rollout.prompt_ids)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}                             # address -> bytes of what autograd keeps

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    sizes, tokens = [], []
    for rows in torch.arange(num_prompts) * (len(rollout.completions) // num_prompts), torch.arange(1):
        kept.clear()
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            result = policy.forward(rollout, rows)
        sizes.append(sum(kept.values()))
        del result
        _, lengths = prompts_and_lengths(rollout, rows)
        tokens.append(sum(lengths) if policy.shares_prompts else len(rows) * max(lengths))
    return max(0.0, (sizes[0] - sizes[1]) / (tokens[0] - tokens[1]))


def fit_tokens(tokens: int, of_token: float, least: int, device: torch.device) -> int:
    """Return the tokens of a forward pass, halved while their activations exceed half of the free memory.

    of_token  bytes of a token, see activations_of_token;  least  the lower limit
    """
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    while tokens > least and tokens * of_token > free / 2:
        tokens //= 2
    return max(tokens, least)


def memory_in_use(device: torch.device) -> int:
    """Return the bytes that tensors have on a GPU; else those of this process, with libraries and weights."""
    is_gpu = device.type == "cuda"
    return torch.cuda.memory_allocated(device) if is_gpu else psutil.Process().memory_info().rss


def describe_memory(policy: Policy, of_token: float, config: Config) -> str:
    """Return a line with the memory that a run of one process needs at least."""
    model, grpo_config = policy.model, config.grpo
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    in_use = memory_in_use(policy.device)
    trained = 4 * model.num_parameters(only_trainable=True)                      # float32
    elsewhere = grpo_config.reference_path or (grpo_config.reference_offload and policy.device.type != "cpu")
    has_copy = config.training.use_grpo and grpo_config.kl_coef and not has_adapter(model) and not elsewhere
    copy = weights / (1 if policy.precision == "float32" else 2) if has_copy else 0
    rows = grpo_config.generation_batch_size or config.rollout_size
    vocabulary = len(model.get_output_embeddings().weight)
    parts = {
        "in use now": in_use, "gradients and optimiser": 3 * trained, "reference": copy,
        f"activations of {policy.max_tokens} tokens": policy.max_tokens * of_token,
        f"logits of {rows} completions x {vocabulary} tokens": rows * vocabulary * BYTES_OF_LOGIT,
    }
    shown = ", ".join(f"{name} {size / GB:.1f}" for name, size in parts.items() if size > 0.05 * GB)
    return f"memory: at least {sum(parts.values()) / GB:.1f} GB" + (f" ({shown})" if shown else "")
