"""
Build the policy of a run: choose the engine that samples and computes log-probabilities, attach vLLM, and
check the result (runs/startup_check.py).
"""

from collections.abc import Callable

import torch

from config import GRPOConfig
from data import encode_prompt
from engine import make_engine
from engine.device_policy import DevicePolicy
from engine.devices import all_gather_object, num_processes
from engine.errors import CannotShare
from engine.network import Network
from policy import Policy
from runs.startup_check import check_head, check_sampling, difference, short_completions
from sample import Rollout


def build_policy(
    network: Network, tokenizer, prompts: list, grpo_config: GRPOConfig, *, max_tokens: int = 2048,
    longest_prompt: int = 0, make_policy: Callable | None = None, teacher: torch.nn.Module | None = None,
    notify: Callable = print,
) -> tuple[Policy, Rollout]:
    """Return the policy for --engine, checked, and the completions that it has sampled for this.

    prompts         for the check, as for Policy.sample
    longest_prompt  the run's longest prompt, in tokens; 0: not known, so share prompts of any length
    make_policy     in place of --engine, the engine of train(engine=...)
    teacher         None, or another model that is forwarded like the policy
    notify          prints a note if prompts should be shared but cannot be
    raises          ValueError if sampling or forward passes would be wrong; RatioError for those of vLLM
    """
    plain = DevicePolicy(network, tokenizer, max_tokens=max_tokens)
    teacher_policy = None if teacher is None else plain.like(teacher)
    limit = grpo_config.generation_max_length
    if make_policy:
        policy = policy_of_caller(make_policy, network, tokenizer, max_tokens)
    elif can_share_prompts(plain, teacher_policy, prompts, grpo_config, longest_prompt, notify):
        policy = make_engine("shared", network, tokenizer, max_tokens=max_tokens)
    elif grpo_config.engine == "vllm":
        policy = plain
    else:
        policy = make_engine("plain", network, tokenizer, max_tokens=max_tokens)
    with plain.sampling():
        rollout = check_sampling(policy, prompts[0], limit)
    if teacher_policy:
        with teacher_policy.sampling():
            check_head(teacher_policy, rollout, "teacher")
    if grpo_config.engine == "vllm" and not make_policy:
        from engine.vllm_engine import VLLM  # for vLLM only

        policy.sampler = VLLM(
            policy, max_length=longest_prompt + limit, memory=grpo_config.engine_memory,
            at_once=grpo_config.generation_batch_size)
        check_sampling(policy, prompts[0], limit, grpo_config)
    return policy, rollout


def policy_of_caller(make_policy: Callable, network: Network, tokenizer, max_tokens: int) -> Policy:
    """Return the policy of train(engine=make_policy). Raises ValueError if it does not support the run."""
    policy = make_policy(network.module, tokenizer, max_tokens=max_tokens)
    if not isinstance(policy, Policy):
        raise ValueError(f"engine: {type(policy).__name__} is no Policy; see CONTRIBUTING.md, A sampler")
    needs_more = num_processes() > 1 or network.precision == "float16"
    if needs_more and not isinstance(policy, DevicePolicy):
        raise ValueError(
            f"engine: {type(policy).__name__} supports neither several processes nor float16; derive "
            "it from DevicePolicy of engine/device_policy.py")
    if isinstance(policy, DevicePolicy):
        policy.set_network(network)
    return policy


def can_share_prompts(
    plain: DevicePolicy, teacher_policy: DevicePolicy | None, prompts: list, grpo_config: GRPOConfig,
    longest_prompt: int, notify: Callable,
) -> bool:
    """Return True if sharing prompts is faster and, on all ranks, computes the same as plain rows.

    Raises ValueError if they cannot be shared although --engine is shared.
    """
    engine = grpo_config.engine
    may_be_plain = longest_prompt and engine == "auto" and plain.device.type not in ("xla", "cuda")
    if engine == "plain" or (may_be_plain and not saves_tokens(longest_prompt, grpo_config)):
        return False
    fault, limit = "", grpo_config.generation_max_length
    for policy in filter(None, (plain, teacher_policy)):  # both on each rank, so that collectives match
        with policy.sampling():
            fault = fault_of_sharing(policy, prompts, limit) or fault
    if all(all_gather_object(not fault)):
        return True
    note = f"prompts are not shared: {fault or 'another rank cannot'}"
    if engine == "shared":
        raise ValueError(f"--engine=shared: {note}; use --engine plain")
    notify(f"  note   {note}")
    return False


def saves_tokens(prompt_tokens: int, grpo_config) -> bool:
    """Return True if sharing prompts saves a fifth of a step's tokens; saving less is not faster.

    prompt_tokens  length of the longest prompt;  grpo_config  a GRPOConfig. docs/results.md has measurements
    """
    copies = grpo_config.num_completions_per_prompt
    return prompt_tokens * (copies - 1) > 0.2 * copies * (prompt_tokens + grpo_config.generation_max_length)


def fault_of_sharing(plain: DevicePolicy, prompts: list, most_tokens: int) -> str:
    """Compare log-probabilities of shared cache and packed rows with those of plain rows; "" if equal."""
    shared = make_engine("shared", plain.network, plain.tokenizer, max_tokens=plain.max_tokens)
    prompts = [encode_prompt(plain.tokenizer, prompt) for prompt in prompts]
    try:
        rollout = shared.sample(prompts, short_completions(most_tokens), 0, num_completions=2)
        rollout.completion_mask[1::2, 5:] = False         # to pack rows of different lengths
        packed = shared.log_probs(rollout).logp
    except (CannotShare, TypeError) as error:
        if isinstance(error, TypeError) and "token_layout" not in str(error):
            raise
        return str(error)                                 # TypeError: a forward method without **kwargs
    rows = plain.log_probs(rollout).logp
    sampled = rollout.sampling_logp.where(rollout.completion_mask, 0.0)
    both = torch.stack([packed, sampled])
    return difference(shared, "shared and plain rows", both, rows.expand(2, -1, -1))
