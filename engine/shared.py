"""
The shared engine: a prompt is forwarded once for all its completions, in sampling and in training. Results
are those of the plain engine to rounding; layers that carry state from token to token need that one.
"""

from torch import Tensor

from engine.cache import PrefixCache
from engine.packing import pack_groups
from engine.plain import Engine
from engine.prefix_attention import use_prefix_attention
from logprobs import LogProbs, completion_log_probs
from sample import Rollout, sample_completions_for_prompts


class Shared(Engine):
    """Sample and score with one copy of each prompt."""

    shares_prompts = True

    def sample(self, prompts: list, config, **options) -> Rollout:
        """As Engine.sample."""
        with use_prefix_attention(self.model):
            return sample_completions_for_prompts(
                self.model, self.tokenizer, prompts, config, cache_type=PrefixCache, **options)

    def log_probs(
        self, rollout: Rollout, rows: Tensor | None, policy: dict, *, model=None, **others
    ) -> LogProbs:
        """As Engine.log_probs."""
        return completion_log_probs(model or self.model, rollout, rows, **policy, pack=pack_groups, **others)
