"""
The plain engine: how completions are sampled and scored, with a row of prompt and completion for each. Every
other engine is a subclass with the same methods; a caller's own is passed to train(config, engine=...).

Shapes: P prompts, G completions of each, B = P*G rows, T completion tokens.
"""

from contextlib import AbstractContextManager

from torch import Tensor

from engine.errors import RunError
from engine.policy import moved_to
from engine.precision import is_exact
from engine.sharding import forward_pass, gathered_weights
from logprobs import LogProbs, completion_log_probs, micro_batches
from sample import Rollout, sample_completions_for_prompts


class Engine:
    """Sample from a model, and score completions under it."""

    shares_prompts = False      # a prompt is forwarded once for all its completions
    same_arithmetic = True      # sample and log_probs agree to the rounding of the model's own passes

    def __init__(self, model, tokenizer, *, max_tokens: int = 2048):
        """max_tokens: tokens of a forward pass in training, the same on all ranks."""
        self.model, self.tokenizer, self.max_tokens = model, tokenizer, max_tokens

    @property
    def device(self):
        """Return the device of the model."""
        return next(self.model.parameters()).device

    @property
    def ratio_tolerance(self) -> float:
        """Return the largest mean of |ratio - 1| on policy: more where the sampler rounds differently."""
        return (0.01 if is_exact(self.model) else 0.1) * (1 if self.same_arithmetic else 3)

    def require_ratios_of_1(self, deviation: float) -> None:
        """Raise RunError if the trainer gives sampled tokens other probabilities than the sampler.

        deviation  mean of |ratio - 1| before any update, NaN if no row was forwarded
        """
        if deviation > self.ratio_tolerance:              # False for NaN
            raise RunError(
                f"first ratios must be 1, but differ from it by {deviation:.2g} on average (at most "
                f"{self.ratio_tolerance:g}): the sampler gives tokens other probabilities than the trainer; "
                "see docs/troubleshooting.md."
            )

    def on_device(self, model) -> AbstractContextManager:
        """Return a context within which another model, a reference, is on the engine's device."""
        return moved_to(model, self.device)

    def sampling(self) -> AbstractContextManager:
        """Return the context of sampling a round of prompts. All ranks enter it, with prompts or not."""
        return gathered_weights(self.model)

    def sample(self, prompts: list, config, **options) -> Rollout:
        """Sample a group for each prompt of this rank: options as for sample_completions_for_prompts."""
        if self.device.type == "xla":
            raise ValueError(
                "--engine=plain: not on XLA, which would compile its cache for every token; leave it out, "
                "or take a model without layers that carry state"
            )
        return sample_completions_for_prompts(self.model, self.tokenizer, prompts, config, **options)

    def micro_batches(self, rollout: Rollout, rows: Tensor, min_batches: int = 1) -> list[Tensor]:
        """Split rows into batches of at most max_tokens tokens, the same on all ranks.

        min_batches  fewer if there are fewer rows
        """
        return micro_batches(rollout, rows, self.max_tokens, min_batches)

    def log_probs(
        self, rollout: Rollout, rows: Tensor | None, distribution: dict, *, model=None, reference=None,
        value_head=None,
    ) -> LogProbs:
        """Compute log-probabilities (rows, T) of completions, with gradient: see completion_log_probs.

        distribution  temperature, top_k, top_p, min_p;  model  in place of the engine's: a reference
        """
        return completion_log_probs(
            model or self.model, rollout, rows, **distribution, reference=reference, value_head=value_head,
            run_forward=forward_pass,
        )
