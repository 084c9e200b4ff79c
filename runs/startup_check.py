"""
The start-up check: test the assumptions of training on two prompts, with this model, tokenizer and rewards.
It runs before every training; a run does not start if an assumption fails.

    python train.py --use_grpo --check ...          print all results and stop
"""

import inspect
import math
import re
from dataclasses import dataclass, replace
from itertools import islice

import torch

from analysis.reward_linter import completions_of, flags_of, score_texts
from config import GRPOConfig
from data import encode_completion, encode_prompt
from engine import make_engine, saves_tokens
from engine.errors import CannotShare
from engine.text_model import has_experts
from engine.plain import Engine
from engine.precision import is_exact
from experience import compare_with_sampler, log_probs_of_rollout
from logprobs import LogProbs
from sample import Rollout, decode_completion, stop_token_ids

TOLERANCE = 1e-2                # nats; forward passes of different shapes agree to about 1e-5 in float32,
TOLERANCE_HALF = 0.3            # and to about 0.01 in bfloat16, less in float16 and TF32
INSTEAD = "; plain rows instead"
ROWS = 16                       # of which the rewards are tried
LONG = 20                       # words of an answer that is a solution or a text


@dataclass
class Finding:
    """Result of one check."""

    name: str
    ok: bool | None             # None: a note
    found: str
    fix: str = ""               # a remedy if ok is False


def choose_engine(
    plain: Engine, ranks, prompts: list, config, longest_prompt: int | None = None
) -> tuple[Engine, Finding]:
    """Return the shared engine where that is faster, and the plain one's results on all ranks; else plain.

    prompts         as for Engine.sample;  config  a GRPOConfig
    longest_prompt  of the run, in tokens; None: share prompts of any length
    """
    may_be_plain = longest_prompt and config.engine == "auto" and plain.device.type not in ("xla", "cuda")
    if config.engine == "plain" or (may_be_plain and not saves_tokens(longest_prompt, config)):
        return plain, Finding("plain rows", True, "a row for each completion")
    shared = make_engine("shared", plain.model, plain.tokenizer, max_tokens=plain.max_tokens)
    prompts = [encode_prompt(plain.tokenizer, prompt) for prompt in prompts]
    finding = check_packing(shared, plain, prompts, shortened(config))
    on_all_ranks = ranks.sum(int(finding.ok is True)) == ranks.size
    return shared if on_all_ranks else plain, finding


def of_two_lengths(prompt: list[int]) -> list[list[int]]:
    """Return a prompt and its second half, so that a sampler has to pad."""
    return [prompt, prompt[len(prompt) // 2 :]]


def shortened(config, length: int = 16):
    """Return a GRPOConfig with completions of at most `length` tokens."""
    return replace(config, generation_max_length=min(length, config.generation_max_length))


def check_setup(
    engine: Engine, examples: list[dict], config, reward_functions: list, *, more_rows: bool = False
) -> list[Finding]:
    """Run all checks but choose_engine's on two examples.

    engine            plain or shared;  config  a GRPOConfig
    reward_functions  [] for supervised training. Those of conversations are not tried: their points depend on
                      the environment
    more_rows         try them on ROWS examples, not on one
    """
    model, tokenizer = engine.model, engine.tokenizer
    prompts = [encode_prompt(tokenizer, example["prompt"]) for example in examples[:2]]
    rollout = engine.sample(of_two_lengths(prompts[0]), shortened(config), seed=0, num_completions=2)
    plain = make_engine("plain", model, tokenizer)
    findings = [
        *check_tokens(model, tokenizer, prompts),
        Finding("first prompt", None, repr(tokenizer.decode(prompts[0]))),
        check_head(plain, rollout),
        check_sampler(plain, rollout, config),
    ]
    if isinstance(examples[0]["prompt"], list) and not tokenizer.chat_template:
        missing = "the tokenizer has no chat template, so messages are joined as text (--check prints one)"
        findings.append(Finding("template", None, missing))
    if opened := re.search(r"<(?!assistant)\w+>\s*\Z", tokenizer.decode(prompts[0])):
        begin = f"the prompt ends with {opened[0]!r}: completions, which are scored, begin after it"
        findings.append(Finding("template", None, begin))
    if reward_functions and not config.environment and config.reward_functions != ["none"]:
        answered = [example for example in islice(examples, ROWS) if example.get("answer")] or [examples[0]]
        stop_ids = stop_token_ids(model, tokenizer)
        findings += check_rewards(answered[0], config, reward_functions, tokenizer, stop_ids)
        findings += note_long_answers(examples, reward_functions)
        if more_rows:
            findings += compare_gold_with_wrong(answered, config, reward_functions)
    return findings


def refuse_broken(findings: list[Finding]) -> None:
    """Raise ValueError for the first check that failed."""
    if broken := next((finding for finding in findings if finding.ok is False), None):
        raise ValueError(f"start-up check: {broken.name}: {broken.found}; {broken.fix}")


def refuse_wrong_sampler(engine: Engine) -> None:
    """Raise ValueError if an engine, plain or shared, samples by other probabilities than its model's."""
    config = GRPOConfig(
        generation_max_length=8, generation_temperature=1.0, generation_top_k=0, generation_top_p=1.0)
    refuse_broken(check_setup(engine, [{"prompt": "1+1=?"}], config, []))


def check_tokens(model, tokenizer, prompts: list[list[int]]) -> list[Finding]:
    """Check that prompts begin with at most one BOS and do not end with a stop id, and that there is one.

    Later tokens with the id of BOS may be right: a template of ChatML can begin every message with it.
    """
    stops, bos_id = stop_token_ids(model, tokenizer), tokenizer.bos_token_id
    twice = bos_id is not None and any(prompt[:2] == [bos_id, bos_id] for prompt in prompts)
    stop_tokens = ", ".join(f"{i} {tokenizer.convert_ids_to_tokens(i)!r}" for i in stops)
    is_open = all(prompt[-1] not in stops for prompt in prompts)
    end = "does not end with a stop id" if is_open else "ends with a stop id, so there is nothing to continue"
    return [
        Finding("BOS", not twice, f"{'two' if twice else 'at most one'} at the start of a prompt",
                "one is the tokenizer's: remove that in the data, or in the chat template"),
        Finding("stop ids", len(stops) > 0, stop_tokens,
                "set eos_token_id in the model's generation_config.json"),
        Finding("open prompt", is_open, end, "switch add_eos_token off in tokenizer_config.json"),
    ]


@torch.no_grad()
def check_head(plain: Engine, rollout: Rollout, name: str = "head") -> Finding:
    """Compare the chunked head with the model's own forward pass, at temperature 1, on the first row."""
    mask = rollout.completion_mask[0]
    prompt, completion = rollout.prompt_ids[0][rollout.prompt_mask[0]], rollout.completion_ids[0][mask]
    ids = torch.cat([prompt, completion])[None].to(plain.device)
    logits = plain.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    own = logits.float().log_softmax(-1).gather(-1, completion[:, None].to(plain.device))[:, 0]
    ours = plain.log_probs(rollout, torch.tensor([0]), {}).logp[0, mask]
    fix = "logits of this architecture need a step that compute_logits in logprobs.py lacks: add it"
    return compare(plain.model, name, "chunked head and the model's own", ours, own, fix)


@torch.no_grad()
def check_sampler(plain: Engine, rollout: Rollout, config) -> Finding:
    """Compare the log-probabilities that tokens were sampled with and those that training computes.

    The plain engine pads prompts on the left to sample, and rows on the right to train.
    """
    trained = plain.log_probs(rollout, None, config.distribution).logp
    options = "--attn_implementation eager, or --generation_top_p 1 --generation_top_k 0"
    fix = f"ratios would not start at 1: try {options}"
    return compare(plain.model, "sampler", "sampler and trainer", rollout.sampling_logp, trained, fix)


def check_engine(engine: Engine, ranks, examples: list[dict], config) -> Finding:
    """Compare the log-probabilities that vLLM or a caller's engine sampled with and those of training, and
    the tokens that it drew with these: -log p is the entropy on average. Call on all ranks.
    """
    prompt = encode_prompt(engine.tokenizer, examples[0]["prompt"])
    with engine.sampling():
        rollout = engine.sample(of_two_lengths(prompt), shortened(config, 64), seed=0, num_completions=8)
    trained = log_probs_of_rollout(engine, ranks, rollout, config.distribution)
    found = compare_with_sampler(trained.logp, rollout)
    errors = surprise_in_standard_errors(trained, rollout.completion_mask)
    ok = found["sampler_deviation"] <= engine.ratio_tolerance
    if ok and abs(errors) > 5:
        return Finding("engine", False, f"draws {'less' if errors > 0 else 'more'} likely tokens than its "
                       f"log-probabilities say, by {abs(errors):.0f} standard errors", "correct sample")
    fix = "sample and log_probs compute other probabilities: correct one; vLLM: --precision float32"
    return Finding("engine", ok, f"mean of |ratio - 1| {found['sampler_deviation']:.4f}, largest difference "
                   f"{found['engine_deviation']:.1e} nat", fix)


def surprise_in_standard_errors(trained: LogProbs, mask: torch.Tensor) -> float:
    """Return the mean of -log p - entropy of tokens (B, T) in its standard errors; 0 on average.

    Where one token is nearly certain, a sample may hold none of the rare ones that make most of the variance:
    it is at least 3 times a small entropy, which it exceeds there.
    """
    entropy = trained.entropy[mask].double()                                     # (n,)
    surprise = -trained.logp[mask].double() - entropy
    variance = max(float(surprise.var()), min(1.0, 3 * float(entropy.mean())), 1e-12)
    return float(surprise.mean()) * math.sqrt(len(surprise) / variance)


@torch.no_grad()
def check_packing(shared: Engine, plain: Engine, prompts: list[list[int]], config) -> Finding:
    """Compare completions packed behind one prompt with plain rows, which are slower but always correct.

    The shared cache, packed rows and plain rows compute log-probabilities of the same completions. ok is True
    or None, and there is a fix if all could be computed and differ.
    """
    try:
        rollout = shared.sample(prompts, config, seed=0, num_completions=2)
        rollout.completion_mask[1::2, 5:] = False         # packs of different lengths
        packed = shared.log_probs(rollout, None, config.distribution).logp.cpu()
    except CannotShare as error:
        return Finding("packing", None, f"off: {error}{INSTEAD}")
    rows = plain.log_probs(rollout, None, config.distribution).logp.cpu()
    both = torch.stack([packed, rollout.sampling_logp.where(rollout.completion_mask, 0.0)])
    finding = compare(shared.model, "packing", "packed and plain rows", both, rows.expand(2, -1, -1), "")
    if finding.ok:
        return finding
    fix = "engine/packing.py, prefix_attention.py or cache.py has a fault; --engine plain does without"
    return replace(finding, ok=None, found=f"off: {finding.found}{INSTEAD}", fix=fix)


def compare_gold_with_wrong(answered: list[dict], config, reward_functions: list) -> list[Finding]:
    """Note in how many examples the answer earns no more than a wrong one, or is not scored."""
    texts = [kinds.get(kind, "") for kinds in map(completions_of, answered) for kind in ("gold", "wrong")]
    points, _, _ = score_texts(reward_functions, config.weights, texts, answered, config)        # (rows, 2)
    unclear = int((~(points[:, 0] > points[:, 1])).sum())
    found = f"gold earns no more than wrong in {unclear} of {len(answered)} examples"
    return [Finding("rows", None, found)] if unclear else []


def note_long_answers(examples, reward_functions: list) -> list[Finding]:
    """Note how many answers that reward functions read are long texts, such as whole solutions."""
    if not any("answer" in inspect.signature(function).parameters for function in reward_functions):
        return []
    long = [example for example in examples if len(str(example.get("answer") or "").split()) > LONG]
    found = f"{len(long)} of {len(examples)} answers have more than {LONG} words, such as "
    hint = ": does each end with its answer, in a form of docs/data.md?"
    return [Finding("rows", None, f"{found}{long[0]['answer']!r:.60}{hint}")] if long else []


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


def check_rewards(
    example: dict, config, reward_functions: list, tokenizer, stop_ids: list[int]
) -> list[Finding]:
    """Score a completion of each kind of analysis/reward_linter.py for an example; note suspicious points.

    Completions are encoded and decoded before, as those that are sampled.
    """
    texts = {
        kind: decode_completion(tokenizer, encode_completion(tokenizer, text, stop_ids)[:-1])
        for kind, text in completions_of(example).items()
    }
    scores, per_function, failures = score_texts(                                # (number of kinds, 1)
        reward_functions, config.weights, list(texts.values()), [example] * len(texts), config)
    totals = dict(zip(texts, scores[:, 0].tolist(), strict=True))
    totals = {kind: total for kind, total in totals.items() if not math.isnan(total)}
    if not totals:
        found = f"{', '.join(per_function)} returned None or NaN for each of {len(texts)} completions"
        if failures:
            found = "{function} failed: {error}".format(**failures[0])
        fix = "nothing could be scored: correct the function, or add the columns it needs, such as answers"
        return [Finding("rewards", False, found, fix)]
    by_function = "; ".join(
        f"{name} {', '.join(f'{p:g}' for p in row[:, 0].tolist())}" for name, row in per_function.items()
    )
    found = ", ".join(f"{kind} {total:.2f}" for kind, total in totals.items()) + f" points ({by_function})"
    flags = [f"the total {flag}: is that intended?" for flag in flags_of(totals, is_total=True)]
    return [Finding("rewards", True, found), *(Finding("rewards", None, flag) for flag in flags)]
