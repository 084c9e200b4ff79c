"""
The start-up check: test the assumptions of training on two prompts, with this model, tokenizer and rewards.
It runs before every training; a run does not start if an assumption fails.

    python train.py --use_grpo --check ...          print all results and stop
"""

import math
from dataclasses import dataclass, replace

import torch

from analysis.reward_linter import completions_of, flags_of, texts_as_rollout
from config import GRPOConfig
from data import encode_prompt
from engine.chat_template import as_messages, is_ids
from engine.errors import first_line
from engine.packing import left_pad
from engine.text_model import has_experts
from environments.conversations import Conversation, run_scripted_turns
from environments.loading import responders
from experience import compare_with_sampler, log_probs_of_rollout, ratio_tolerance
from logprobs import completion_log_probs
from engine.precision import is_exact
from reward_functions.loading import data_example
from rewards import Reports, compute_rewards_for_completions
from sample import Rollout, sample_completions_for_prompts, stop_token_ids
from sources.tasks import demonstration

TOLERANCE = 1e-2                # nats; forward passes of different shapes agree to about 1e-5 in float32,
TOLERANCE_HALF = 0.3            # and to about 0.01 in bfloat16, less in float16 and TF32
INSTEAD = "; plain rows instead"


@dataclass
class Finding:
    """Result of one check."""

    name: str
    ok: bool | None             # None: a note
    found: str
    fix: str = ""               # a remedy if ok is False


def check_setup(
    model, tokenizer, examples: list[dict], config, reward_functions: list, environment=None,
    shared_prompt: bool = True, engine=None,
) -> list[Finding]:
    """Run all checks on two examples.

    config            a GRPOConfig
    reward_functions  [] for supervised training
    shared_prompt     False: do not check packing
    engine            a VLLMEngine that samples in place of the model: see check_engine
    """
    answered = next((example for example in examples if example.get("answer")), examples[0])
    examples = examples[:2]
    short = replace(config, generation_max_length=min(16, config.generation_max_length))
    prompts = [encode_prompt(tokenizer, example["prompt"]) for example in examples]
    packing = Finding("packing", None, "off: --engine plain")
    if shared_prompt:
        packing = check_packing(model, tokenizer, prompts, short)
    padded = [prompts[0], prompts[0][len(prompts[0]) // 2 :]]         # the second one, to the first's length
    rollout = sample_completions_for_prompts(
        model, tokenizer, padded, short, seed=0, num_completions=2, shared_prompt=packing.ok is True
    )
    findings = [
        *check_tokens(model, tokenizer, prompts),
        *check_template(tokenizer, examples[0]["prompt"]),
        check_head(model, rollout),
        *([] if engine else [check_sampler(model, rollout, config)]),
        packing,
    ]

    def new_conversation():
        (respond,) = responders(environment, [answered])
        return Conversation(tokenizer, answered["prompt"], respond, config, stop_token_ids(model, tokenizer))

    if reward_functions:
        start = new_conversation if environment else None
        findings += check_rewards(answered, config, reward_functions, start)
    return findings


def check_tokens(model, tokenizer, prompts: list[list[int]]) -> list[Finding]:
    """Check that prompts begin with at most one BOS and do not end with a stop id, and that there is one.

    Later tokens with the id of BOS may be right: a template of ChatML can begin every message with it.
    """
    stops, bos_id, pad_id = stop_token_ids(model, tokenizer), tokenizer.bos_token_id, tokenizer.pad_token_id
    twice = bos_id is not None and any(prompt[:2] == [bos_id, bos_id] for prompt in prompts)
    pad = f"pad is {pad_id} {tokenizer.pad_token!r}"
    pad += ", also a stop id; masks depend on positions alone" if pad_id in stops else ", not a stop id"
    stop_tokens = ", ".join(f"{i} {tokenizer.convert_ids_to_tokens(i)!r}" for i in stops)
    is_open = all(prompt[-1] not in stops for prompt in prompts)
    end = "does not end with a stop id" if is_open else "ends with a stop id, so there is nothing to continue"
    return [
        Finding("BOS", not twice, f"{'two' if twice else 'at most one'} at the start of a prompt",
                "one is the tokenizer's: remove that in the data, or in the chat template"),
        Finding("pad", None, pad),
        Finding("stop ids", len(stops) > 0, stop_tokens,
                "set eos_token_id in the model's generation_config.json"),
        Finding("open prompt", is_open, end, "switch add_eos_token off in tokenizer_config.json"),
    ]


def check_template(tokenizer, prompt: str | list[dict]) -> list[Finding]:
    """Describe the first prompt as the model sees it, and messages that no chat template renders."""
    ids, messages = encode_prompt(tokenizer, prompt), as_messages(prompt)
    other = [*messages[:-1], messages[-1] | {"content": "another"}] if tokenizer.chat_template else []
    ignored = bool(other) and not is_ids(prompt) and encode_prompt(tokenizer, other) == ids
    missing = "the tokenizer has no chat template, so messages are joined as text (--check prints one)"
    bare = isinstance(prompt, list) and not tokenizer.chat_template
    return [
        Finding("first prompt", None, repr(tokenizer.decode(ids))),
        *[Finding("template", None, missing)] * bare,
        *[Finding("template", False, "all prompts have the same tokens", "it ignores them")] * ignored,
    ]


@torch.no_grad()
def check_head(model, rollout: Rollout) -> Finding:
    """Compare the chunked head with the model's own forward pass, at temperature 1, on the first row."""
    device = next(model.parameters()).device
    mask = rollout.completion_mask[0]
    prompt, completion = rollout.prompt_ids[0][rollout.prompt_mask[0]], rollout.completion_ids[0][mask]
    ids = torch.cat([prompt, completion])[None].to(device)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    own = logits.float().log_softmax(-1).gather(-1, completion[:, None].to(device))[:, 0]
    ours = completion_log_probs(model, rollout, torch.tensor([0]), shared_prompt=False).logp[0, mask]
    fix = "logits of this architecture need a step that compute_logits in engine/logits.py lacks: add it"
    return compare(model, "head", "chunked head and the model's own", ours, own, fix)


@torch.no_grad()
def check_sampler(model, rollout: Rollout, config) -> Finding:
    """Compare the log-probabilities that tokens were sampled with and those that training computes.

    Sampling pads prompts on the left, training pads rows on the right.
    """
    trained = completion_log_probs(model, rollout, **config.policy, shared_prompt=False).logp.cpu()
    options = "--attn_implementation eager, or --generation_top_p 1 --generation_top_k 0"
    fix = f"ratios would not start at 1: try {options}"
    return compare(model, "sampler", "sampler and trainer", rollout.sampling_logp, trained, fix)


def check_engine(engine, model, tokenizer, examples: list[dict], config, shared_prompt: bool) -> Finding:
    """Compare the log-probabilities that vLLM sampled with and those of the trainer. Call on all ranks."""
    short = replace(config, generation_max_length=min(64, config.generation_max_length))
    with engine.awake(model):
        rollout = sample_completions_for_prompts(
            model, tokenizer, [example["prompt"] for example in examples[:2]], short, seed=0,
            num_completions=8, engine=engine,
        )
    options = dict(max_tokens=2048, shared_prompt=shared_prompt)
    found = compare_with_sampler(log_probs_of_rollout(model, rollout, config.policy, **options).logp, rollout)
    ok = found["sampler_deviation"] <= ratio_tolerance(model, engine)
    fix = "vLLM computes this model differently: take --engine auto, or --precision float32"
    return Finding("engine", ok, f"mean of |ratio - 1| {found['sampler_deviation']:.4f}, "
                   f"largest difference {found['engine_deviation']:.1e} nat", fix)


def can_share_prompts(model, tokenizer, prompt) -> bool:
    """Return True if completions can be packed behind one prompt, in sampling and in training."""
    config = GRPOConfig(
        generation_temperature=1.0, generation_top_p=1.0, generation_top_k=0, generation_max_length=8
    )
    return check_packing(model, tokenizer, [encode_prompt(tokenizer, prompt)], config).ok is True


@torch.no_grad()
def check_packing(model, tokenizer, prompts: list[list[int]], config) -> Finding:
    """Compare completions packed behind one prompt with plain rows, which are slower but always correct.

    Random completions test the trainer, completions from a shared cache the sampler. ok is True or None, and
    there is a fix if both could be computed and differ.
    """
    rollout = random_rollout(model, tokenizer, prompts)
    try:
        packed = completion_log_probs(model, rollout, **config.policy, shared_prompt=True).logp
        sampled = sample_completions_for_prompts(model, tokenizer, prompts, config, seed=0, num_completions=2)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return Finding("packing", None, f"off: {first_line(error)}{INSTEAD}")
    rows = completion_log_probs(model, rollout, **config.policy, shared_prompt=False).logp
    again = completion_log_probs(model, sampled, **config.policy, shared_prompt=False).logp.cpu()
    shared = torch.cat([packed.flatten().cpu(), sampled.sampling_logp.flatten()])
    plain = torch.cat([rows.flatten().cpu(), again.flatten()])
    finding = compare(model, "packing", "packed and plain rows", shared, plain, "")
    if finding.ok:
        return finding
    fix = "engine/packing.py, prefix_attention.py or cache.py has a fault; --engine plain does without"
    return replace(finding, ok=None, found=f"off: {finding.found}{INSTEAD}", fix=fix)


def random_rollout(model, tokenizer, prompts: list[list[int]]) -> Rollout:
    """Return two completions of each prompt, of random tokens and different lengths."""
    known = min(len(tokenizer), model.get_input_embeddings().num_embeddings)
    ids = torch.randint(0, known, (2 * len(prompts), 8), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(8) < torch.tensor([8, 5] * len(prompts))[:, None]
    return Rollout(
        *left_pad(prompts, tokenizer.pad_token_id), ids, mask, torch.zeros(mask.shape), mask[:, 0],
        [""] * len(ids),
    )


def compare(model, name: str, what: str, left, right, fix: str) -> Finding:
    """Check that two tensors of log-probabilities agree up to rounding.

    In 16 bits with experts, on average: rounding changes the experts of a few tokens, by up to some nats.
    """
    differences = (left.cpu() - right.cpu()).abs().nan_to_num(torch.inf)
    tolerance = TOLERANCE if is_exact(model) else TOLERANCE_HALF
    on_average = tolerance == TOLERANCE_HALF and has_experts(model)
    difference = float(differences.mean() if on_average else differences.max())
    found = f"{what} differ by {'on average' if on_average else 'at most'} {difference:.1e} nat"
    return Finding(name, difference <= tolerance, found, fix)


def gold_turns(example: dict) -> list[str]:
    """Return the policy's turns in the demonstration; without one, the answer in the usual format, or []."""
    gold, answer = example.get("completion"), example.get("answer")
    if isinstance(gold, list):
        return [message["content"] for message in gold if message["role"] == "assistant"]
    return [gold or demonstration("because", answer)] if gold or answer else []


def check_rewards(example: dict, config, reward_functions: list, new_conversation=None) -> list[Finding]:
    """Score a completion of each kind of analysis/reward_linter.py for an example; note suspicious points.

    new_conversation  starts a conversation with the environment, if there is one; the completions are its
                      last turns, after the earlier turns of the demonstration
    """
    texts, turn_points = completions_of(example), None
    completions = list(texts.values())
    if new_conversation:
        before = gold_turns(example)[:-1]
        results = [run_scripted_turns(new_conversation(), [*before, text]) for text in completions]
        completions, points = map(list, zip(*results, strict=True))
    rollout = texts_as_rollout(completions)
    if new_conversation:
        turn_points = torch.tensor(points)[:, None].expand(rollout.completion_mask.shape)
    reports = Reports()
    scores, per_function = compute_rewards_for_completions(                      # (number of kinds, 1)
        reward_functions, config.weights, rollout, [example] * len(texts), on_error=config.reward_errors,
        timeout=config.reward_timeout, reports=reports, turn_points=turn_points,
    )
    totals = dict(zip(texts, scores[:, 0].tolist(), strict=True))
    totals = {kind: total for kind, total in totals.items() if not math.isnan(total)}
    if not totals:
        found = f"{', '.join(per_function)} returned None or NaN for each of {len(texts)} completions"
        examples = "".join(map(data_example, reward_functions))
        fix = f"the data may lack columns that it needs, such as answers{examples}"
        if reports.failures:
            found = "{function} failed on {completion!r:.60}: {error}".format(**reports.failures[0])
            fix = "correct the function"
        return [Finding("rewards", False, found, f"nothing could be scored: {fix}")]
    by_function = "; ".join(
        f"{name} {', '.join(f'{p:g}' for p in row[:, 0].tolist())}" for name, row in per_function.items()
    )
    found = ", ".join(f"{kind} {total:.2f}" for kind, total in totals.items()) + f" points ({by_function})"
    flags = [f"the total {flag}: is that intended?" for flag in flags_of(totals, is_total=True)]
    return [Finding("rewards", True, found), *(Finding("rewards", None, flag) for flag in flags)]
