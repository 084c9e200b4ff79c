"""Engines, which sample and score: plain, shared prompts, vLLM. Their attention, devices, ranks, sharding."""


def saves_tokens(prompt_tokens: int, config) -> bool:
    """Return True if one copy of each prompt saves a fifth of a step's tokens: less is no faster.

    prompt_tokens  of the longest prompt;  config  a GRPOConfig. Figures are in docs/benchmarks.md
    """
    copies = config.num_completions_per_prompt
    return prompt_tokens * (copies - 1) > 0.2 * copies * (prompt_tokens + config.generation_max_length)


def make_engine(name: str, model, tokenizer, *, max_tokens: int = 2048, **of_vllm):
    """Return the engine of a name: plain, shared or vllm, which trains as shared does.

    max_tokens  tokens of a forward pass in training, the same on all ranks
    of_vllm     max_length, memory: see VLLM
    """
    # Here: engine/errors.py, which the sandbox imports, loads without torch.
    from engine.plain import Engine
    from engine.shared import Shared
    from engine.vllm_engine import VLLM

    if name not in ("plain", "shared", "vllm"):
        raise ValueError(f"--engine={name}: plain, shared or vllm")
    engine = (Engine if name == "plain" else Shared)(model, tokenizer, max_tokens=max_tokens)
    return VLLM(engine, **of_vllm) if name == "vllm" else engine
