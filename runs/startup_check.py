"""
The start-up check of every run: choose the engine that samples and computes log-probabilities, and reject a
model or tokenizer that would be trained on wrong tokens or log-probabilities.
"""

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch

from config import GRPOConfig
from data import encode_prompt
from engine import make_engine, saves_tokens
from engine.errors import CannotShare
from engine.device_policy import DevicePolicy
from engine.devices import Ranks, num_processes
from engine.network import Network
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
    raises          ValueError if sampling or forward passes would be wrong
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
    with in_use(plain):
        rollout = refuse_wrong_sampler(policy, prompts, limit)
    if teacher_policy:
        with in_use(teacher_policy):
            refuse_wrong_head(teacher_policy, rollout, "teacher")
    if grpo_config.engine == "vllm" and not make_policy:
        from engine.vllm_engine import VLLM  # for vLLM only

        policy.sampler = VLLM(
            policy, max_length=longest_prompt + limit, memory=grpo_config.engine_memory,
            at_once=grpo_config.generation_batch_size)
        refuse_wrong_sampler(policy, prompts, limit, grpo_config)
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


@contextmanager
def in_use(policy: DevicePolicy):
    """Within the context a model is on its policy's device, with weights gathered from all ranks."""
    with policy.network.in_use(policy.device), policy.sampling():
        yield


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
        with in_use(policy):
            fault = fault_of_sharing(policy, prompts, limit) or fault
    if Ranks().sum(int(not fault)) == num_processes():
        return True
    note = f"prompts are not shared: {fault or 'another rank cannot'}"
    if engine == "shared":
        raise ValueError(f"--engine=shared: {note}; use --engine plain")
    notify(f"  note   {note}")
    return False


def fault_of_sharing(plain: DevicePolicy, prompts: list, most_tokens: int) -> str:
    """Compare log-probabilities of shared cache and packed rows with those of plain rows; "" if equal."""
    shared = make_engine("shared", plain.network, plain.tokenizer, max_tokens=plain.max_tokens)
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
    with policy.sampler.sampling() if policy.sampler else nullcontext():         # gets the weights first
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
