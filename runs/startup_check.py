"""
The start-up check of every run: reject a model or tokenizer that would be trained on wrong tokens or wrong
log-probabilities.
"""

from contextlib import nullcontext
from dataclasses import replace

import torch

from config import GRPOConfig
from data import encode_prompt
from engine.device_policy import DevicePolicy
from engine.text_model import has_experts
from policy import Policy
from sample import Rollout

TOLERANCE = 1e-2                # nats; forward passes of different shapes agree to about 1e-5 in float32,
TOLERANCE_HALF = 0.3            # and to about 0.01 in bfloat16, less in float16 and TF32
MOST_TOKENS = 16                # maximum length of completions sampled for a check


def short_completions(most_tokens: int) -> GRPOConfig:
    """Return settings that sample short completions from the unrestricted distribution."""
    return GRPOConfig(
        generation_max_length=min(MOST_TOKENS, most_tokens), generation_temperature=1.0, generation_top_k=0,
        generation_top_p=1.0)


def check_sampling(
    policy: Policy, prompt="1+1=?", most_tokens: int = MOST_TOKENS, distribution: GRPOConfig | None = None
) -> Rollout:
    """Raise ValueError if prompts, sampling or log-probabilities would be wrong; of a sampler such as vLLM,
    RatioError. Return the test completions.

    They continue the prompt, and half of it, which is padded: on the left in sampling, on the right in
    training.

    distribution  settings whose temperature, top_k, ... restrict the samples; None: they are unrestricted
    """
    tokenizer = policy.tokenizer
    prompt = encode_prompt(tokenizer, prompt)
    half = prompt[len(prompt) // 2 :]
    settings, seeds = short_completions(most_tokens), [(0, 0), (0, 1)]
    if distribution is not None:
        settings = replace(distribution, generation_max_length=settings.generation_max_length)
    with policy.sampler.sampling() if policy.sampler else nullcontext():         # gets the weights first
        rollout = policy.sample([prompt, half], settings, seeds, num_completions=2)
    plain = DevicePolicy(getattr(policy, "network", policy.model), tokenizer)
    if distribution is None:                              # the model's own head does not restrict it
        check_head(plain, rollout)
    trained, sampled = plain.log_probs(rollout).logp, rollout.sampling_logp
    if not policy.same_arithmetic:                        # held to the limit of every step
        ratios = (trained - sampled)[rollout.completion_mask].exp()
        policy.require_ratios_of_1(float((ratios - 1).abs().nan_to_num(torch.inf).mean()))
    elif fault := difference(plain, "sampler and trainer", sampled, trained):
        raise ValueError(f"start-up check: {fault}; try --attn_implementation eager")
    return rollout


@torch.no_grad()
def check_head(plain: DevicePolicy, rollout: Rollout, name: str = "policy") -> None:
    """Raise ValueError if the log-probabilities of logprobs.py differ from those of the model's own logits.

    Only the first row is compared. Reasons are an adapter of the head, or a step that compute_logits lacks.
    """
    mask = rollout.completion_mask[0]
    prompt, completion = rollout.prompt_ids[0][rollout.prompt_mask[0]], rollout.completion_ids[0][mask]
    ids = torch.cat([prompt, completion])[None].to(plain.device)
    logits = plain.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    own = logits.float().log_softmax(-1).gather(-1, completion[:, None].to(plain.device))[:, 0]
    ours = plain.log_probs(rollout, torch.tensor([0])).logp[0, mask]
    if fault := difference(plain, f"{name}: logprobs.py and the model's own logits", ours, own):
        raise ValueError(
            f"start-up check: {fault}; logits of this architecture need a step that compute_logits in "
            "logprobs.py lacks: add it there")


def difference(policy: DevicePolicy, what: str, left: torch.Tensor, right: torch.Tensor) -> str:
    """Return how much two tensors of log-probabilities differ, "" if only by rounding.

    With experts in 16 bits the mean is compared: rounding changes a few tokens' experts, and so some nats.
    """
    differences = (left.cpu() - right.cpu()).abs().nan_to_num(torch.inf)
    tolerance = TOLERANCE if policy.network.is_exact else TOLERANCE_HALF
    on_average = tolerance == TOLERANCE_HALF and has_experts(policy.model)
    found = float(differences.mean() if on_average else differences.max())
    bound = "on average" if on_average else "at most"
    return "" if found <= tolerance else f"{what} differ by {bound} {found:.1e} nat"
