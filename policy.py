"""
The policy: the language model that is trained, with the four operations that training needs.

    sample            sample completions of prompts, with the log-probability of each token
    log_probs         compute the log-probabilities of given completions, without gradient
    forward_backward  compute a loss, and add its gradient to the parameters' gradients
    optimizer_step    update the parameters with their gradients

This class covers one process in float32, and forwards each completion together with its prompt. Subclasses in
engine/ add other devices, 16 bits, several processes, prompts that are forwarded only once, and vLLM. The
reference is a Policy too, without an optimiser.

Callers need not know how the rows of an update are split into micro-batches (one forward pass each): weights
of tokens are computed over the whole update (grpo.token_weights), so losses and gradients add up.

Shapes: B completions of T tokens, b of them in an update or a micro-batch, N tokens, H hidden size.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from logprobs import LogProbs, completion_log_probs, micro_batches
from sample import Rollout, sample_completions_for_prompts


class RatioError(RuntimeError):
    """Sampler and trainer assign different probabilities to the same tokens, before any update."""


class Policy:
    """A model and its tokenizer; for training also an optimiser, a scheduler and optionally a value head."""

    shares_prompts = False      # True: each prompt is forwarded once for all its completions
    same_arithmetic = True      # False: sampler and trainer round differently, as with vLLM
    ratio_tolerance = 0.01      # see require_ratios_of_1

    def __init__(self, model, tokenizer, *, max_tokens: int = 2048):
        """max_tokens: the most tokens in a micro-batch, padding included."""
        self.model, self.tokenizer, self.max_tokens = model, tokenizer, max_tokens
        self.steps_begun = 0                              # optimiser steps, including one that raised
        self.set_optimizer(None, None)

    def set_optimizer(self, optimizer, scheduler, value_head=None) -> None:
        """Set what a training phase begins with. value_head: maps hidden states (N, H) to values (N,)."""
        self.optimizer, self.scheduler, self.value_head = optimizer, scheduler, value_head
        self.losses: list[float] = []                     # one for each forward_backward since the last step

    # ---- the four operations -------------------------------------------------------------------------------

    def sample(
        self, prompts: list, config, seeds: int | Sequence, *, num_completions: int | None = None,
        reply: Callable | None = None,
    ) -> Rollout:
        """Sample a group of completions for each prompt: see sample_completions_for_prompts."""
        return sample_completions_for_prompts(
            self.model, self.tokenizer, prompts, config, seed=seeds, num_completions=num_completions,
            reply=reply)

    @torch.no_grad()
    def log_probs(self, rollout: Rollout, rows: Tensor | None = None, *, reference=None) -> LogProbs:
        """Compute the log-probabilities of completions, and their values if there is a value head.

        rows       (b,) indices of completions; None: all of them
        reference  another Policy, to compute the exact KL(policy || reference) at each token
        returns    LogProbs (b, T), on the CPU
        """
        shape = rollout.completion_mask.shape             # (B, T)
        rows = torch.arange(len(rollout.completion_ids)) if rows is None else rows
        if not len(rows):
            return LogProbs.of_no_rows(shape[1])
        results: dict[str, Tensor] = {}
        for part_rows, new in self.forward_passes(rollout, rows, reference):     # in any order
            for name, x in new.computed().items():
                results.setdefault(name, torch.zeros(shape))[part_rows] = x.float().cpu()
        return LogProbs(**{name: x[rows] for name, x in results.items()})

    def forward_backward(self, batch, loss_fn: Callable, *, reference=None) -> dict[str, float]:
        """Compute a loss over the rows of an update, and add its gradient to the parameters' gradients.

        batch      a Batch of experience.py
        loss_fn    loss_fn(new, part) -> (terms, metrics), called for each micro-batch
                     new      LogProbs (b, T) of some rows, with gradient;  part  the Batch of these rows
                     terms    scalar tensors by name: the loss is their sum over all micro-batches
                     metrics  tensors by name: (b, T) are averaged over all forwarded tokens, scalars added up
        reference  another Policy, for new.kl
        returns    total_loss, terms and metrics. If nothing is forwarded, terms are 0 and metrics NaN

        If the only term is named policy_loss, rows whose advantages are all 0 are not forwarded: their
        gradient would be 0. So give no other loss this name.
        """
        # Ask the loss function for the names of its terms, which decide what is forwarded.
        no_rows = batch.select(batch.rows[:0])
        terms, metrics = loss_fn(LogProbs.of_no_rows(batch.mask.shape[1]), no_rows)
        rows = batch.rows_with_gradient(of_policy_loss_alone=terms.keys() == {"policy_loss"})
        num_tokens = int(batch.mask[rows].sum())
        results = dict.fromkeys(["total_loss", *terms], 0.0) | dict.fromkeys(metrics, math.nan)
        if num_tokens:
            results |= self.add_gradients(batch, rows, loss_fn, reference)
            results |= {name: results[name] / num_tokens for name, x in metrics.items() if x.ndim}
        self.losses.append(results["total_loss"])
        return results

    def optimizer_step(self, max_grad_norm: float = math.inf) -> dict:
        """Clip the gradient norm to max_grad_norm, take an optimiser step, and clear the gradient.

        returns  grad_norm: the norm before clipping;  skipped: 1 if the gradient or the loss is not finite,
                 and then neither parameters nor learning-rate schedule change. If the gradient is 0, the
                 schedule advances and the parameters do not change
        """
        norm = self.clip_gradient(max_grad_norm)
        skipped = not (math.isfinite(norm) and math.isfinite(sum(self.losses)))
        if norm == 0:
            self.optimizer.zero_grad()                    # to None, so that momentum moves no weights
        if not skipped:
            self.steps_begun += 1
            self.optimizer.step()
            self.scheduler.step()
        self.clear_gradient()
        return {"grad_norm": norm, "skipped": int(skipped)}

    # ---- parts of the operations, which engine/ overrides --------------------------------------------------

    def forward_passes(
        self, rollout: Rollout, rows: Tensor, reference=None
    ) -> Iterator[tuple[Tensor, LogProbs]]:
        """Forward rows in micro-batches. Yield the rows of each micro-batch with their LogProbs."""
        for part_rows in micro_batches(rollout, rows, self.max_tokens):
            yield part_rows, self.forward(rollout, part_rows, reference)

    def forward(self, rollout: Rollout, rows: Tensor, reference=None) -> LogProbs:
        """Compute the LogProbs (b, T) of some rows in one forward pass, with gradient unless no_grad."""
        reference_model = None if reference is None else reference.model
        return completion_log_probs(
            self.model, rollout, rows, reference=reference_model, value_head=self.value_head)

    def add_gradients(self, batch, rows: Tensor, loss_fn: Callable, reference) -> dict[str, float]:
        """Run forward and backward passes. Return the sums of the loss, its terms and metrics, by name."""
        sums = []                                         # for each micro-batch, of all values
        for part_rows, new in self.forward_passes(batch.rollout, rows, reference):
            part = batch.select(part_rows, new.logp.device)
            terms, metrics = loss_fn(new, part)
            loss = sum(terms.values())
            self.backward(loss)
            values = {"total_loss": loss, **terms, **metrics}
            summed = [torch.where(part.mask, x, 0.0).sum() if x.ndim else x for x in values.values()]
            sums.append(torch.stack(summed).detach())
        totals = [sum(column) for column in zip(*(x.tolist() for x in sums), strict=True)]
        return dict(zip(values, totals, strict=True))

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    @property
    def trained_parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def clip_gradient(self, max_norm: float) -> float:
        """Scale the gradient down to max_norm if its norm is larger. Return the norm before."""
        return float(torch.nn.utils.clip_grad_norm_(self.trained_parameters, max_norm))

    def clear_gradient(self) -> None:
        """Clear the gradient, and the losses that it was computed from."""
        self.optimizer.zero_grad()
        self.losses = []

    # ---- other methods -------------------------------------------------------------------------------------

    def require_ratios_of_1(self, deviation: float) -> None:
        """Raise RatioError if sampler and trainer assign different probabilities to the sampled tokens.

        deviation  the mean of |trainer / sampler - 1| before any update; NaN if nothing was forwarded
        """
        if deviation > self.ratio_tolerance:              # False for NaN
            raise RatioError(
                f"first ratios must be 1, but differ from 1 by {deviation:.2g} on average (at most "
                f"{self.ratio_tolerance:g} is allowed): sampler and trainer give the same tokens different "
                "probabilities; see docs/troubleshooting.md.")

    def map_over_processes(self, work: Callable, *lists: list) -> list:
        """Return [work(*lists)]; of several processes, each works on a slice, and all get all results."""
        return [work(*lists)]

    def like(self, model) -> "Policy":
        """Return a policy with another model and the same settings, such as a reference."""
        other = copy.copy(self)
        other.model = model
        other.set_optimizer(None, None)
        return other

    @torch.no_grad()
    def update_reference(self, reference: "Policy", alpha: float) -> None:
        """Set reference = alpha * reference + (1 - alpha) * policy; alpha=0 copies the policy exactly."""
        for old, new in zip(reference.model.parameters(), self.model.parameters(), strict=True):
            old.lerp_(new.to(old), 1 - alpha)             # in the reference's precision
