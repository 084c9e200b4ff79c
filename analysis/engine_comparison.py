"""
Compare the probabilities of an engine that samples with those of the trainer (the start-up check of --engine
vllm).
"""

from typing import NamedTuple

from experience import log_probs_of_rollout
from sample import Rollout


class Comparison(NamedTuple):
    """Result of compare_rollout, over all sampled tokens."""

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
    ratio, deviation = float(differences.exp().mean()), float(differences.abs().max())
    return Comparison(ratio, deviation, float((whole - trainer).exp().mean()))
