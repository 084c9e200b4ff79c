"""Policies for any device and many processes: shared prompts, vLLM, ranks, sharding, LoRA, 16 bits."""


def saves_tokens(prompt_tokens: int, config) -> bool:
    """Return True if one copy of each prompt saves a fifth of a step's tokens: less is no faster.

    prompt_tokens  of the longest prompt;  config  a GRPOConfig. Figures are in docs/results.md
    """
    copies = config.num_completions_per_prompt
    return prompt_tokens * (copies - 1) > 0.2 * copies * (prompt_tokens + config.generation_max_length)


def make_engine(name: str, model, tokenizer, *, max_tokens: int = 2048):
    """Return the policy of an engine's name: plain, shared, or vllm, which trains as plain.

    max_tokens  tokens of a forward pass in training, the same on all ranks
    """
    # Here: engine/errors.py, which the sandbox imports, loads without torch.
    if name not in ("plain", "shared", "vllm"):
        raise ValueError(f"make_engine: {name} must be plain, shared or vllm")
    if name == "shared":
        from engine.shared import Shared

        return Shared(model, tokenizer, max_tokens=max_tokens)
    from engine.device_policy import DevicePolicy, runs_in_core
    from policy import Policy

    if name == "plain" and runs_in_core(model):
        return Policy(model, tokenizer, max_tokens=max_tokens)
    policy = DevicePolicy(model, tokenizer, max_tokens=max_tokens)
    if name == "vllm":
        from engine.vllm_engine import VLLM

        policy.sampler = VLLM(policy)
    return policy
