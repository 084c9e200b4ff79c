"""
Compare an engine that samples with the trainer: do both compute the same probabilities?

The built-in sampler and the trainer compute the same, so the trainer can measure any other engine: that of
--engine vllm in the start-up check, or a server, by infer.py --compare_engine URL.
"""

if __name__ == "__main__":
    raise SystemExit("analysis/engine_comparison.py is no program; run: python infer.py --compare_engine URL")

import math
from dataclasses import dataclass, replace

import httpx2
import torch
from torch import Tensor

from data import encode_prompt
from engine.errors import first_line
from engine.packing import left_pad, pad_rows
from experience import log_probs_of_rollout
from sample import Rollout

TIMEOUT = 600                   # seconds for the answer to one prompt
NUM_WORST = 5                   # tokens that are printed
USUAL_CAP = 2.0                 # the smallest --importance_cap that is advised


@dataclass
class Comparison:
    """Log-probabilities of N sampled tokens, each (N,), in nats, and what they say."""

    ids: Tensor
    trainer: Tensor             # under the distribution that was sampled from: temperature, top-k and top-p
    engine: Tensor              # as the engine returned them
    mean_ratio: float           # mean of the trainer's probability divided by the engine's: 1 if they agree
    deviation: float            # largest difference of a log-probability, in nats
    kept_mass: float            # mean probability that top-k and top-p keep, by the trainer


def compare_rollout(model, rollout: Rollout, policy: dict, **forwarding) -> Comparison:
    """Compare sampling_logp of a rollout with the trainer's log-probabilities. Call on all ranks.

    policy  temperature, top_k, top_p;  forwarding  max_tokens, shared_prompt: as for log_probs_of_rollout
    """
    mask, unrestricted = rollout.completion_mask, policy | {"top_k": 0, "top_p": 1.0}
    trainer, whole = (
        log_probs_of_rollout(model, rollout, each, **forwarding).logp[mask] for each in (policy, unrestricted)
    )
    differences = trainer - rollout.sampling_logp[mask]
    return Comparison(
        rollout.completion_ids[mask], trainer, rollout.sampling_logp[mask], float(differences.exp().mean()),
        float(differences.abs().max()), float((whole - trainer).exp().mean()),
    )


def compare_server(chat_model, examples: list[dict], url: str) -> None:
    """Print how much a server's log-probabilities differ, at temperature 1 alone, then as config says.

    chat_model  a ChatModel with the weights that the server has;  examples  their prompts are sent
    url         of an OpenAI-compatible server that returns token ids, such as vllm serve
    raises      ValueError, one line
    """
    model, config = chat_model.model, chat_model.config
    forwarding = {"max_tokens": 2048, "shared_prompt": chat_model.shared_prompt}
    plain = replace(config, generation_temperature=1.0, generation_top_p=1.0, generation_top_k=0)
    for settings in [plain] + [config] * (config.policy != plain.policy):
        rollout = request_rollout(url, chat_model.tokenizer, examples, settings, chat_model.seed)
        found = compare_rollout(model, rollout, settings.policy, **forwarding)
        print("\n".join(describe(found, settings.policy, chat_model.tokenizer)))
        raw = compare_rollout(model, rollout, plain.policy, **forwarding)        # of temperature 1
        if (raw.trainer - raw.engine).abs().mean() < (found.trainer - found.engine).abs().mean():
            print("  these are of temperature 1 and top-p 1: start vllm serve with --logprobs-mode "
                  "processed_logprobs")


def describe(found: Comparison, policy: dict, tokenizer) -> list[str]:
    """Return lines with the figures of a comparison and the tokens that differ most."""
    differences = found.trainer - found.engine
    ratios = differences.exp()
    outside = float(((ratios < 0.9) | (ratios > 1.1)).float().mean())
    worst = differences.abs().argsort(descending=True)[:NUM_WORST].tolist()
    tokens = ", ".join(f"{tokenizer.decode([found.ids[i]])!r} {float(differences[i]):+.1e}" for i in worst)
    cap = max(USUAL_CAP, math.ceil(10 * float(ratios.quantile(0.999))) / 10)     # leaves 99.9 % as they are
    return [
        f"{len(ratios)} tokens at temperature {policy['temperature']:g}, "
        f"top-p {policy['top_p']:g}, top-k {policy['top_k']}",
        f"  mean ratio trainer / engine   {found.mean_ratio:.5f}",
        f"  ratios outside 0.9 to 1.1     {outside:.2%}",
        f"  largest difference            {found.deviation:.1e} nat",
        f"  worst tokens, nat             {tokens}",
        f"  mass kept by the trainer      {found.kept_mass:.4f}",
        f"  advised                       --importance_cap {cap:g}",
    ]


def request_rollout(url: str, tokenizer, examples: list[dict], config, seed: int) -> Rollout:
    """Let a server sample num_completions_per_prompt completions of each prompt. Raises ValueError."""
    prompts, choices = [encode_prompt(tokenizer, example["prompt"]) for example in examples], []
    request = {
        "n": config.num_completions_per_prompt, "max_tokens": config.generation_max_length,
        "temperature": config.generation_temperature, "top_p": config.generation_top_p,
        "top_k": config.generation_top_k, "logprobs": 0, "return_token_ids": True, "seed": seed,
    }
    try:
        with httpx2.Client(base_url=url.rstrip("/").removesuffix("/v1"), timeout=TIMEOUT) as client:
            request["model"] = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
            for prompt in prompts:
                response = client.post("/v1/completions", json=request | {"prompt": prompt})
                choices += response.raise_for_status().json()["choices"]
        rows = [torch.tensor(choice["token_ids"]) for choice in choices]
        logp = [torch.tensor(choice["logprobs"]["token_logprobs"]).reshape(row.shape)
                for choice, row in zip(choices, rows, strict=True)]
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, RuntimeError, LookupError, TypeError) as error:
        raise ValueError(
            f"--compare_engine={url}: {type(error).__name__} {first_line(error)}; it needs a server that "
            "returns token ids and log-probabilities, such as vllm serve"
        ) from None
    mask = pad_rows([torch.ones(len(row), dtype=torch.bool) for row in rows])
    return Rollout(
        *left_pad(prompts, tokenizer.pad_token_id), pad_rows(rows, tokenizer.pad_token_id), mask,
        pad_rows(logp), finished=torch.tensor([choice["finish_reason"] == "stop" for choice in choices]),
        completions=[choice["text"] for choice in choices],
    )
