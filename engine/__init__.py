"""Policies for any device and several processes: shared prompts, vLLM, ranks, sharding, LoRA, 16 bits."""


def make_engine(name: str, model, tokenizer, *, max_tokens: int = 2048):
    """Return the policy for an engine: plain, shared, or vllm, which trains like plain.

    model       a module of transformers, or a Network of engine/network.py
    max_tokens  the most tokens in a training pass, the same on all ranks
    """
    # Imports are local because the sandbox imports engine/errors.py without torch.
    if name not in ("plain", "shared", "vllm"):
        raise ValueError(f"make_engine: {name} must be plain, shared or vllm")
    if name == "shared":
        from engine.shared import Shared

        return Shared(model, tokenizer, max_tokens=max_tokens)
    from engine.device_policy import DevicePolicy, runs_in_core
    from engine.network import network_of
    from policy import Policy

    network = network_of(model)
    if name == "plain" and runs_in_core(network):
        return Policy(network.module, tokenizer, max_tokens=max_tokens)
    policy = DevicePolicy(model, tokenizer, max_tokens=max_tokens)
    if name == "vllm":
        from engine.vllm_engine import VLLM

        policy.sampler = VLLM(policy)
    return policy
