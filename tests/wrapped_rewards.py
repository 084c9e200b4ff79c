"""Reward functions called as training calls them."""

from config import GRPOConfig
from reward_functions.calling import Reports, wrap_reward_functions
from rewards import compute_rewards_for_completions


def call_and_score(functions, weights, rollout, examples, *, reports=None, on_error="raise", timeout=0.0):
    """The functions' points, added up; fills reports."""
    config = GRPOConfig(reward_errors=on_error, reward_timeout=timeout)
    wrapped, made = wrap_reward_functions(functions, rollout, config)
    scored = compute_rewards_for_completions(wrapped, weights, rollout, examples)
    vars(reports or Reports()).update(vars(made))
    return scored


def length(completions, **columns):
    return [float(len(text)) for text in completions]
