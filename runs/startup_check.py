"""
The start-up check: on two prompts, whether everything that training takes for granted is true of this model, this
tokenizer and these rewards. It runs before every training and refuses to start when a promise is broken.

    python train.py --use_grpo --check ...          prints all of it and stops
"""

import math
from dataclasses import dataclass, replace

import torch

from analysis.reward_linter import as_rollout, completions_of, flags_of
from config import GRPOConfig
from data import encode_prompt
from engine.chat_template import encode_reply
from engine.packing import left_pad, positions_of
from environments.conversations import Conversation, run_scripted_turns
from environments.loading import responders
from logprobs import completion_log_probs
from model import first_line, precision_of
from rewards import compute_rewards_for_completions
from sample import Rollout, sample_completions_for_prompts, stop_token_ids
from sources.tasks import demonstration

TOLERANCE = 1e-2                # nats; float32 forward passes of different shape agree to about 1e-5
TOLERANCE_HALF = 0.3            # those in bfloat16 to about 0.01, in float16 to less


@dataclass
class Finding:
    """One thing that was looked at."""

    name: str
    ok: bool | None             # None: nothing to pass or fail, only worth knowing
    found: str
    fix: str = ""               # what to change when it is not ok


def check_setup(
    model, tokenizer, examples: list[dict], config, reward_functions: list, environment=None, share: bool = True
) -> list[Finding]:
    """Look at two examples from all sides. config: GRPOConfig; reward_functions may be empty for supervised training.

    share  whether prompts may be shared: --shared_prompt auto
    """
    answered = next((example for example in examples if example.get("answer")), examples[0])
    examples = examples[:2]
    short = replace(config, generation_max_length=min(16, config.generation_max_length))
    prompts = [encode_prompt(tokenizer, example["prompt"]) for example in examples]
    packing = Finding("packing", None, "off: --shared_prompt never")
    if share:
        packing = check_packing(model, tokenizer, prompts, short)
    rollout = sample_completions_for_prompts(
        model, tokenizer, prompts, short, seed=0, num_completions=2, shared_prompt=packing.ok is True
    )
    findings = [
        *check_tokens(model, tokenizer, prompts),
        check_padding(model, tokenizer, prompts[0]),
        check_head(model, rollout),
        check_sampler(model, rollout, config),
        packing,
        Finding("row 0", None, draw_row(rollout, 0)),
    ]

    def begin():
        (respond,) = responders(environment, [answered])
        return Conversation(tokenizer, answered["prompt"], respond, config, stop_token_ids(model, tokenizer))

    if environment:
        findings.append(check_environment(begin(), gold_turns(answered)))
    if reward_functions:
        findings += check_rewards(answered, config, reward_functions, begin if environment else None)
    return findings


def check_tokens(model, tokenizer, prompts: list[list[int]]) -> list[Finding]:
    """BOS, pad and stop ids."""
    stops = stop_token_ids(model, tokenizer)
    bos = max(prompt.count(tokenizer.bos_token_id) for prompt in prompts) if tokenizer.bos_token_id is not None else 0
    shares_bos = tokenizer.bos_token_id in stops          # GPT-2 has one id for everything
    pad = f"pad is {tokenizer.pad_token_id} {tokenizer.pad_token!r}"
    return [
        Finding("BOS", bos <= 1 or shares_bos, f"{bos} in a prompt", "remove it from the data, or from the chat template"),
        Finding("pad", None, pad + (", also a stop id; masks go by position" if tokenizer.pad_token_id in stops else "")),
        Finding("stop ids", len(stops) > 0, ", ".join(f"{i} {tokenizer.convert_ids_to_tokens(i)!r}" for i in stops),
                "set eos_token_id in the model's generation_config.json"),
        Finding("open prompt", all(prompt[-1] not in stops for prompt in prompts), "does not end with a stop id"
                if all(prompt[-1] not in stops for prompt in prompts) else "ends with a stop id: there is nothing to continue",
                "switch add_eos_token off in tokenizer_config.json"),
    ]


@torch.no_grad()
def check_padding(model, tokenizer, prompt: list[int]) -> Finding:
    """The next token's log-probabilities must not change when the prompt is padded on the left."""
    device = next(model.parameters()).device
    ids, mask = (part.to(device) for part in left_pad([prompt, prompt + prompt], tokenizer.pad_token_id))
    padded = model(
        input_ids=ids[:1], attention_mask=mask[:1], position_ids=positions_of(mask)[:1], use_cache=False
    ).logits[:, -1]
    alone = model(input_ids=ids[:1, len(prompt) :], use_cache=False).logits[:, -1]
    return agreement(model, "padding", "with and without padding they", padded.float().log_softmax(-1),
                     alone.float().log_softmax(-1),
                     "this architecture ignores position_ids or the padding mask: try --attn_implementation eager")


@torch.no_grad()
def check_head(model, rollout: Rollout) -> Finding:
    """The chunked head against the model's own forward pass, at temperature 1, on the first row."""
    device = next(model.parameters()).device
    mask = rollout.completion_mask[0]
    prompt, completion = rollout.prompt_ids[0][rollout.prompt_mask[0]], rollout.completion_ids[0][mask]
    ids = torch.cat([prompt, completion])[None].to(device)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    own = logits.float().log_softmax(-1).gather(-1, completion[:, None].to(device))[:, 0]
    ours = completion_log_probs(model, rollout, torch.tensor([0]), shared_prompt=False).logp[0, mask]
    return agreement(model, "head", "head in chunks and the model's own", ours, own,
                     "its way from hidden states to logits has a step that compute_logits in engine/logits.py does not know: add it")


@torch.no_grad()
def check_sampler(model, rollout: Rollout, config) -> Finding:
    """The log-probability a token was drawn with against the one that training computes."""
    trained = completion_log_probs(model, rollout, **config.policy, shared_prompt=False).logp.cpu()
    fix = "ratios would not start at 1: try --attn_implementation eager, or --generation_top_p 1 --generation_top_k 0"
    return agreement(model, "sampler", "sampler and trainer", rollout.sampling_logp, trained, fix)


def can_share_prompts(model, tokenizer, prompt) -> bool:
    """Whether siblings can be packed behind one prompt, in sampling and in training."""
    config = GRPOConfig(generation_temperature=1.0, generation_top_p=1.0, generation_top_k=0, generation_max_length=8)
    return check_packing(model, tokenizer, [encode_prompt(tokenizer, prompt)], config).ok is True


@torch.no_grad()
def check_packing(model, tokenizer, prompts: list[list[int]], config) -> Finding:
    """Siblings packed behind one prompt against one row each, on completions that are made up and on such that were sampled
    from a shared cache. Not ok: sample and train with rows, slower but right.
    """
    rollout = random_rollout(model, tokenizer, prompts)
    try:
        packed = completion_log_probs(model, rollout, **config.policy, shared_prompt=True).logp
        sampled = sample_completions_for_prompts(model, tokenizer, prompts, config, seed=0, num_completions=2)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return Finding("packing", None, f"off: {first_line(error) or type(error).__name__}; plain rows instead")
    rows = completion_log_probs(model, rollout, **config.policy, shared_prompt=False).logp
    again = completion_log_probs(model, sampled, **config.policy, shared_prompt=False).logp.cpu()
    both = torch.cat([packed.flatten().cpu(), sampled.sampling_logp.flatten()])
    alone = torch.cat([rows.flatten().cpu(), again.flatten()])
    finding = agreement(model, "packing", "packed and plain rows", both, alone, "")
    return finding if finding.ok else replace(finding, ok=None, found=f"off: {finding.found}; plain rows instead")


def random_rollout(model, tokenizer, prompts: list[list[int]]) -> Rollout:
    """Two completions of each prompt, of random tokens and different lengths."""
    known = min(len(tokenizer), model.get_input_embeddings().num_embeddings)
    ids = torch.randint(0, known, (2 * len(prompts), 8), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(8) < torch.tensor([8, 5] * len(prompts))[:, None]
    return Rollout(
        *left_pad(prompts, tokenizer.pad_token_id), ids, mask, torch.zeros(mask.shape), mask[:, 0], [""] * len(ids)
    )


def agreement(model, name: str, what: str, left, right, fix: str) -> Finding:
    """Two tensors of log-probabilities that should be the same."""
    difference = float((left.cpu() - right.cpu()).abs().nan_to_num(torch.inf).max())
    tolerance = TOLERANCE if precision_of(model) == "float32" else TOLERANCE_HALF
    return Finding(name, difference <= tolerance, f"{what} differ by at most {difference:.1e} nat", fix)


def gold_turns(example: dict) -> list[str]:
    """What the policy should say, as far as that is known: the demonstration, or the answer in the usual form."""
    gold, answer = example.get("completion"), example.get("answer")
    if isinstance(gold, list):
        return [message["content"] for message in gold if message["role"] == "assistant"]
    return [gold or demonstration("because", answer)] if gold or answer else []


def check_environment(conversation: Conversation, gold: list[str]) -> Finding:
    """What the environment answers to a first turn."""
    said = gold[0] if gold else ""
    message, points = conversation.environment_step(said)
    if message is None:
        return Finding("environment", True, f"ends the conversation after {said!r:.60}, with {points:g} points")
    length = len(encode_reply(conversation.tokenizer, conversation.prompt, message, conversation.stops))
    answer = f"{message['content']!r:.60} ({length} tokens)"
    return Finding("environment", True, f"answers {answer} to {said!r:.60}, with {points:g} points")


def check_rewards(example: dict, config, reward_functions: list, begin=None) -> list[Finding]:
    """What completions of every kind that analysis/reward_linter.py knows would earn, for one example.

    begin() begins a conversation, if there is an environment; they are its last turns, after those of the demonstration
    """
    texts, turn_points = completions_of(example), None
    completions = list(texts.values())
    if begin:
        before = gold_turns(example)[:-1]
        completions, given = zip(
            *(run_scripted_turns(begin(), [*before, text]) for text in texts.values()), strict=True
        )
    rollout = as_rollout(list(completions))
    if begin:
        turn_points = torch.tensor(given)[:, None].expand(rollout.completion_mask.shape)
    failures: list[dict] = []
    total, per_function = compute_rewards_for_completions(
        reward_functions, config.weights, rollout, [example], on_error=config.reward_errors, clips=config.reward_clips,
        timeout=config.reward_timeout, failures=failures, turn_points=turn_points,
    )
    points = {kind: value for kind, value in zip(texts, total[0].tolist(), strict=True) if not math.isnan(value)}
    by_function = "; ".join(f"{name} {', '.join(f'{p:g}' for p in row[0].tolist())}" for name, row in per_function.items())
    if not points:
        nothing = f"{', '.join(per_function)} returned None or NaN for each of {len(texts)} completions"
        found = "".join(f"{f['function']} failed on {f['completion']!r:.60}: {f['error']}" for f in failures[:1]) or nothing
        return [Finding("rewards", False, found, "nothing could be scored: " + (
            "mend the function" if failures else "does the data have what it looks for, such as answers?"
        ))]
    found = ", ".join(f"{kind} {value:.2f}" for kind, value in points.items()) + f" points ({by_function})"
    flags = [f"the total {flag}: is that what you want?" for flag in flags_of(points, is_total=True)]
    return [Finding("rewards", True, found), *(Finding("rewards", None, flag) for flag in flags)]


def draw_row(rollout: Rollout, row: int) -> str:
    """One character a token: - padding, p prompt, T trained, . not trained."""
    prompt = row // (len(rollout.completion_ids) // len(rollout.prompt_ids))
    return "".join("p" if m else "-" for m in rollout.prompt_mask[prompt].tolist()) + "".join(
        "T" if m else "." for m in rollout.completion_mask[row].tolist()
    )
