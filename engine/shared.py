"""
The shared engine: a prompt is forwarded once for all its completions, in sampling and in training. Results
are those of the plain engine to rounding; layers that carry state from token to token need that one.

Shapes: b rows of T completion tokens, N completion tokens in all, H hidden size, V vocabulary.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from engine.chunked_head import HeadLogProbs
from engine.devices import bucket, copy_together, cut_graph, eager_device
from engine.packing import micro_batches_of_groups, pack_groups
from engine.plain import Engine
from engine.prefix_attention import forward_packed, use_prefix_attention
from engine.sampler import sample_sharing_prompts
from engine.sharding import forward_pass
from logprobs import LogProbs, compute_logits, restrict_logits, scale_and_softcap
from sample import Rollout


class Shared(Engine):
    """Sample and score with one copy of each prompt."""

    shares_prompts = True

    def sample(self, prompts: list, config, **options) -> Rollout:
        """As Engine.sample."""
        with use_prefix_attention(self.model):
            return sample_sharing_prompts(self.model, self.tokenizer, prompts, config, **options)

    def micro_batches(self, rollout: Rollout, rows: Tensor, parts: int = 1) -> list[Tensor]:
        """As Engine.micro_batches; siblings share a batch if they fit."""
        return micro_batches_of_groups(rollout, rows, self.max_tokens, parts)

    def log_probs(
        self, rollout: Rollout, rows: Tensor | None, distribution: dict, *, model=None, reference=None,
        value_head=None,
    ) -> LogProbs:
        """As Engine.log_probs; on the CPU if the model is on XLA."""
        distribution = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | distribution
        rows = torch.arange(len(rollout.completion_ids)) if rows is None else rows.cpu()
        model, device = model or self.model, self.device
        ids, positions, layout, predictor = pack_groups(rollout, rows, device)
        mask = rollout.completion_mask[rows]                                     # (b, T)
        chosen, predictor = rollout.completion_ids[rows][mask], predictor[mask]  # (N,)
        padding = (0, bucket(len(chosen), device) - len(chosen))                 # without a gradient
        tensors = [ids, positions, pad(chosen, padding), pad(predictor, padding)]
        *inputs, chosen, predictor = copy_together(tensors, device)
        inputs.append(layout)
        reference_hidden = None
        if reference is not None:
            with torch.no_grad():
                of_reference = partial(forward_hidden, reference, inputs, predictor)
                reference_hidden = forward_pass(reference, of_reference)

        def policy_logits(raw: Tensor, chosen: Tensor) -> Tensor:
            return restrict_logits(scale_and_softcap(model, raw), chosen=chosen, **distribution)

        def forward_head():
            hidden, head = forward_hidden(model, inputs, predictor), model.get_output_embeddings()
            logp, entropy, kl = HeadLogProbs.apply(
                hidden, head.weight, head.bias, chosen, policy_logits, reference_hidden,
                lambda hidden: compute_logits(reference, hidden) / distribution["temperature"],
            )
            values = None if value_head is None else value_head(hidden).to(logp.dtype)
            results = logp, entropy, None if reference is None else kl, values
            return [None if result is None else result.clone() for result in results]    # FSDP warns of views

        results = forward_pass(model, forward_head)
        cut_graph(device)
        mask = mask.to(eager_device(device))
        zeros = torch.zeros(mask.shape, dtype=results[0].dtype, device=mask.device)
        return LogProbs(*(
            result if result is None else zeros.masked_scatter(mask, result.to(mask.device))
            for result in results
        ))


def forward_hidden(model, inputs: list, predictor: Tensor) -> Tensor:
    """Return the final hidden states (N, H) of the tokens at predictor (N,).

    inputs  ids, positions and layout of a pass
    """
    hidden = forward_packed(model, *inputs)
    # The first tokens of siblings have one predictor. The backward pass of indexing would add up their
    # gradients in the order in which threads finish.
    return embedding(predictor, hidden.flatten(0, 1))
