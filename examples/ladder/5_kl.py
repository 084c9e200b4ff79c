"""
5. GRPO: a KL penalty keeps the policy near the reference, a copy made before the first step.

    python 5_kl.py                        # or: python 5_kl.py BETA=0

A model of 0.3 million parameters learns to sort digits, as in 3275=2357. P prompts with G
completions each are B = P * G rows of ids: Tp tokens of a prompt, then T of a completion.
"""

import copy
import random
import sys

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

SEED, STEPS, LEARNING_RATE = 0, 100, 3e-4
P, G, T = 16, 8, 7
RIGHT, WRONG = 1.0, 0.0                   # rewards
UPDATES, CLIP = 2, 0.2                    # updates on each rollout; clip interval 1 +- CLIP
MICRO_BATCH = 32                          # rows in a forward pass
BETA = 0.1                                # weight of the KL penalty
VOCABULARY, PAD, EOS = "_.=0123456789", 0, 1         # "_" pads, "." ends a completion


def encode(texts):
    return torch.tensor([[VOCABULARY.index(c) for c in text] for text in texts])


def decode(ids):
    return ["".join(VOCABULARY[i] for i in row).rstrip("_") for row in ids.tolist()]


def reward(completion, answer):
    return RIGHT if completion == answer + "." else WRONG


def log_probs(model, ids, cache=None):
    """Compute the logp (log-probability) of every next token, after each token not in the cache."""
    mask = ids != PAD
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)                # of tokens, without padding
    new = slice(cache.get_seq_length() if cache is not None else 0, None)
    return model(ids[:, new], mask, positions[:, new], cache).logits.log_softmax(dim=-1)


@torch.no_grad()
def sample(model, prompts):
    """Sample a completion of each prompt, (B, Tp) ids with padding on the left, token by token.

    Returns ids (B, Tp + T), mask (B, T), which is True up to and including EOS, and logp (B, T).
    """
    ids, cache, running = prompts, DynamicCache(), torch.ones(len(prompts), 1, dtype=torch.bool)
    mask, logp = [], []
    for _ in range(T):
        log_p = log_probs(model, ids, cache)[:, -1]                      # (B, V)
        token = torch.multinomial(log_p.exp(), num_samples=1)            # (B, 1)
        mask.append(running)
        logp.append(log_p.gather(1, token))
        ids = torch.cat([ids, torch.where(running, token, PAD)], dim=1)
        running = running & (token != EOS)
    return ids, torch.cat(mask, dim=1), torch.cat(logp, dim=1)


def completion_logp(model, ids):
    """Compute the logp (B, T) of completions, with a gradient. Column t of ids predicts t + 1."""
    return log_probs(model, ids)[:, -T - 1 : -1].gather(2, ids[:, -T:, None])[:, :, 0]


def compute_advantages(rewards):
    """Compare rewards (P, G) with their group: (r - mean) / std, or 0 if its rewards are equal."""
    assert rewards.shape == (P, G), f"{rewards.shape=} must be {(P, G)}"
    mean, std = rewards.mean(dim=1, keepdim=True), rewards.std(dim=1, keepdim=True)
    equal = rewards.amax(dim=1, keepdim=True) == rewards.amin(dim=1, keepdim=True)
    return torch.where(equal, 0.0, (rewards - mean) / (std + 1e-8))


def policy_loss(logp, old_logp, ref_logp, advantages, mask, weights):
    """Sum weight * (-min(ratio * A, clip(ratio) * A) + BETA * ratio * k3) over tokens.

    ratio = p now / p when sampled. k3 = exp(x) - x - 1 with x = ref_logp - logp. The mean gradient
    of ratio * k3 is that of KL(policy || reference), that of k3 is of KL(reference || policy).
    """
    ratio = torch.where(mask, logp - old_logp, 0.0).exp()            # mask first: exp may overflow
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    x = torch.where(mask, ref_logp - logp, 0.0)
    return (weights * (-gain + BETA * ratio * (x.exp() - x - 1))).sum()


def train_step(model, reference, optimizer, problems):
    prompts, answers = zip(*[problem for problem in problems for _ in range(G)], strict=True)
    ids, mask, old_logp = sample(model, encode(prompts))
    rewards = torch.tensor([*map(reward, decode(ids[:, -T:]), answers)])     # (B,)
    advantages = compute_advantages(rewards.view(P, G)).view(-1, 1)  # (B, 1)
    weights = mask / mask.sum()           # of the whole update, so that micro-batches add up to it
    ref_logp = completion_logp(reference, ids)
    for update in range(UPDATES):
        for rows in torch.arange(P * G).split(MICRO_BATCH):
            logp = completion_logp(model, ids[rows])
            deviation = (logp - old_logp[rows])[mask[rows]].abs().max()
            assert update > 0 or deviation < 1e-3, "the first ratios must be 1"
            tensors = (x[rows] for x in (old_logp, ref_logp, advantages, mask, weights))
            policy_loss(logp, *tensors).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    kl = (weights * (old_logp - ref_logp)).sum()          # nats a token, before the updates
    return f"reward {rewards.mean():.3f}  kl {kl:.3f}  {decode(ids[:1])[0]}"


def accuracy(model, problems):
    prompts, answers = zip(*problems, strict=True)
    completions = decode(sample(model, encode(prompts))[0][:, -T:])
    return sum(c == a + "." for c, a in zip(completions, answers, strict=True)) / len(problems)


def warm_up(model, problems, held_out):
    """Make demonstrations more likely, until a third of the held-out answers are right."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    while accuracy(model, held_out) < 1 / 3:
        for _ in range(2):
            ids = encode(p + (a + ".").ljust(T, "_") for p, a in random.sample(problems, 128))
            mask = ids[:, -T:] != PAD                     # EOS is trained, padding is not
            (-completion_logp(model, ids) * mask / mask.sum()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def main():
    random.seed(SEED)
    torch.manual_seed(SEED)
    numbers = [random.sample("0123456789", k=random.randint(2, 6)) for _ in range(5000)]
    pairs = list({"".join(n).rjust(6, "_") + "=": "".join(sorted(n)) for n in numbers}.items())
    held_out, problems = pairs[:500], pairs[500:]         # such as ("___725=", "257")
    size = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(VOCABULARY), **size)).eval()  # no dropout
    warm_up(model, problems, held_out)
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    print(f"after demonstrations: accuracy {accuracy(model, held_out):.3f}", flush=True)
    for step in range(1, STEPS + 1):
        line = train_step(model, reference, optimizer, random.sample(problems, P))
        if step in (1, STEPS) or step % 20 == 0:
            print(f"step {step:3}  {line}  accuracy {accuracy(model, held_out):.3f}", flush=True)


if __name__ == "__main__":
    for name, value in (setting.split("=") for setting in sys.argv[1:]):
        globals()[name] = type(globals()[name])(value)
    main()
