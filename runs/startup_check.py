"""
The start-up check of every run: choose the engine that samples and computes log-probabilities, and reject a
model or tokenizer that would be trained on wrong tokens or log-probabilities.
"""

from contextlib import nullcontext
from dataclasses import replace

import torch

from config import GRPOConfig
from data import encode_prompt
from engine import make_engine, saves_tokens
from engine.errors import CannotShare
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


def choose_engine(
    plain: DevicePolicy, prompts: list, grpo_config, longest_prompt: int | None = None
) -> tuple[DevicePolicy, str]:
    """Choose the shared engine if it is faster and, on all ranks, computes the same as the plain engine.

    prompts         as for Policy.sample;  grpo_config  a GRPOConfig
    longest_prompt  the run's longest prompt, in tokens; None: share prompts of any length
    returns         the engine; and "", or a note if prompts should be shared but cannot be
    raises          ValueError if they cannot be shared although grpo_config.engine is "shared"
    """
    engine = grpo_config.engine
    may_be_plain = longest_prompt and engine == "auto" and plain.device.type not in ("xla", "cuda")
    if engine == "plain" or (may_be_plain and not saves_tokens(longest_prompt, grpo_config)):
        return plain, ""
    shared = make_engine("shared", plain.network, plain.tokenizer, max_tokens=plain.max_tokens)
    fault = fault_of_sharing(shared, plain, prompts, grpo_config.generation_max_length)
    if plain.ranks.sum(int(not fault)) == plain.ranks.size:
        return shared, ""
    note = f"prompts are not shared: {fault or 'another rank cannot'}"
    if engine == "shared":
        raise ValueError(f"--engine=shared: {note}; use --engine plain")
    return plain, note


def fault_of_sharing(shared: DevicePolicy, plain: DevicePolicy, prompts: list, most_tokens: int) -> str:
    """Compare log-probabilities of shared cache and packed rows with those of plain rows; "" if equal."""
    prompts = [encode_prompt(plain.tokenizer, prompt) for prompt in prompts]
    try:
        rollout = shared.sample(prompts, short_completions(most_tokens), 0, num_completions=2)
        rollout.completion_mask[1::2, 5:] = False         # to pack rows of different lengths
        packed = shared.log_probs(rollout).logp
    except CannotShare as error:
        return str(error)
    rows = plain.log_probs(rollout).logp
    sampled = rollout.sampling_logp.where(rollout.completion_mask, 0.0)
    both = torch.stack([packed, sampled])
    return difference(shared, "shared and plain rows", both, rows.expand(2, -1, -1))


def refuse_wrong_sampler(
    policy: Policy, prompts=("1+1=?",), most_tokens: int = MOST_TOKENS, distribution: GRPOConfig | None = None
) -> Rollout:
    """Raise ValueError if prompts, sampling or log-probabilities would be wrong. Return the test completions.

    They continue the first prompt, and half of it, which is padded: on the left in sampling, on the right in
    training.

    distribution  settings whose temperature, top_k, ... restrict the samples; None: they are unrestricted
    """
    tokenizer = policy.tokenizer
    prompts = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    half = prompts[0][len(prompts[0]) // 2 :]
    settings, seeds = short_completions(most_tokens), [(0, 0), (0, 1)]
    if distribution is not None:
        settings = replace(distribution, generation_max_length=settings.generation_max_length)
    sampler = getattr(policy, "sampler", None)            # such as vLLM, which gets the weights first
    with sampler.sampling() if sampler else nullcontext():
        rollout = policy.sample([prompts[0], half], settings, seeds, num_completions=2)
    plain = DevicePolicy(getattr(policy, "network", policy.model), tokenizer)
    if distribution is None:                              # the model's own head does not restrict it
        refuse_wrong_head(plain, rollout)
    trained, sampled = plain.log_probs(rollout).logp, rollout.sampling_logp
    if not policy.same_arithmetic:                        # held to the limit of every step
        ratios = (trained - sampled)[rollout.completion_mask].exp()
        policy.require_ratios_of_1(float((ratios - 1).abs().nan_to_num(torch.inf).mean()))
    elif fault := difference(plain, "sampler and trainer", sampled, trained):
        raise ValueError(f"start-up check: {fault}; try --attn_implementation eager")
    return rollout


@torch.no_grad()
def refuse_wrong_head(plain: DevicePolicy, rollout: Rollout, name: str = "policy") -> None:
    """Raise ValueError if the log-probabilities of the chunked head differ from those of the model itself.

    Only the first row is compared. Reasons are an adapter of the head, or a step that compute_logits lacks.
    """
    mask = rollout.completion_mask[0]
    prompt, completion = rollout.prompt_ids[0][rollout.prompt_mask[0]], rollout.completion_ids[0][mask]
    ids = torch.cat([prompt, completion])[None].to(plain.device)
    logits = plain.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    own = logits.float().log_softmax(-1).gather(-1, completion[:, None].to(plain.device))[:, 0]
    ours = plain.log_probs(rollout, torch.tensor([0])).logp[0, mask]
    if fault := difference(plain, f"{name}: chunked head and the model's own", ours, own):
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
