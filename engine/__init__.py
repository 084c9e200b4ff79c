"""Engines, which sample and score: plain, shared prompts, vLLM. Their attention, devices, ranks, sharding."""


def saves_tokens(prompt_tokens: int, config) -> bool:
    """Return True if one copy of each prompt saves a fifth of a step's tokens: less is no faster.

    prompt_tokens  of the longest prompt;  config  a GRPOConfig. Figures are in docs/results.md
    """
    copies = config.num_completions_per_prompt
    return prompt_tokens * (copies - 1) > 0.2 * copies * (prompt_tokens + config.generation_max_length)


def make_engine(name: str, model, tokenizer, *, max_tokens: int = 2048):
    """Return the engine of a name, plain or shared; VLLM is made of one of them (engine/vllm_engine.py).

    max_tokens  tokens of a forward pass in training, the same on all ranks
    """
    # Here: engine/errors.py, which the sandbox imports, loads without torch.
    from engine.plain import Engine
    from engine.shared import Shared

    if name not in ("plain", "shared"):
        raise ValueError(f"make_engine: {name} must be plain or shared")
    return (Engine if name == "plain" else Shared)(model, tokenizer, max_tokens=max_tokens)
