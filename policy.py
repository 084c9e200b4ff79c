"""
The policy: a language model that is trained, and the four things that training does with it.

    sample            prompts -> completions, with the log-probability of each token
    log_probs         log-probabilities of completions, without gradient
    forward_backward  add the gradient of a loss to that of the parameters
    optimizer_step    change the parameters by it

This class is complete for one process in float32, and forwards each completion with a copy of its prompt. The
subclasses in engine/ run on any device, in 16 bits, over many processes, share prompts, and sample with vLLM.
A reference is a Policy without an optimiser.

No caller has to know how the rows of an update are split into forward passes: each token has a weight that is
computed over the whole update (grpo.token_weights), so losses and gradients of passes add up.

Shapes: B completions of T tokens, b of them in an update or a pass, N tokens, H hidden size.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from logprobs import LogProbs, completion_log_probs, micro_batches
from sample import Rollout, sample_completions_for_prompts


class RatioError(RuntimeError):
    """The first ratios of an update are not 1: the sampler's probabilities are not the trainer's."""


class Policy:
    """A model and its tokenizer; while it is trained, with an optimiser and perhaps a value head."""

    shares_prompts = False      # a prompt is forwarded once for all its completions
    same_arithmetic = True      # False: log_probs runs before the updates, to be compared with the sampler
    ratio_tolerance = 0.01      # see require_ratios_of_1

    def __init__(self, model, tokenizer, *, max_tokens: int = 2048):
        """max_tokens: in a forward pass of training, padding included."""
        self.model, self.tokenizer, self.max_tokens = model, tokenizer, max_tokens
        self.steps_begun = 0                              # of the optimiser, one that raised included
        self.train_with(optimizer=None, scheduler=None)

    def train_with(self, optimizer, scheduler, value_head=None) -> None:
        """Set the objects of a training phase. value_head: a module, hidden states (N, H) -> values (N,)."""
        self.optimizer, self.scheduler, self.value_head = optimizer, scheduler, value_head
        self.losses: list[float] = []                     # of each forward_backward since the last step

    # ---- the four verbs ------------------------------------------------------------------------------------

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
        """Compute the log-probabilities of completions, and with a value head their values.

        rows       (b,) indices of completions; None: all
        reference  another Policy, for the exact KL(policy || reference) at each token
        returns    LogProbs (b, T), on the CPU
        """
        rows = torch.arange(len(rollout.completion_ids)) if rows is None else rows
        if not len(rows):
            return LogProbs.of_no_rows(rollout.completion_mask.shape[1])
        shape, results = rollout.completion_mask.shape, {}
        for part_rows, new in self.forward_passes(rollout, rows, reference):     # in another order than rows
            for name, x in new.computed().items():
                results.setdefault(name, torch.zeros(shape))[part_rows] = x.float().cpu()
        return LogProbs(**{name: x[rows] for name, x in results.items()})

    def forward_backward(self, batch, loss_fn: Callable, *, reference=None) -> dict[str, float]:
        """Add the gradient of a loss over the rows of an update to that of the parameters.

        batch      a Batch of experience.py
        loss_fn    loss_fn(new, part) -> (terms, metrics), called once with no rows and then for each pass
                     new      LogProbs (b, T) of some rows, with gradient;  part  the Batch of these rows
                     terms    scalars by name: their sum, added up over all passes, is the loss
                     metrics  (b, T): averaged over all tokens that are forwarded;  scalars: added up
        reference  another Policy, for new.kl
        returns    total_loss, the terms and the metrics. If nothing is forwarded: terms of 0, metrics of NaN

        If policy_loss is the only term, rows whose advantages are all 0 are not forwarded: it is proportional
        to the advantages, so they have no gradient. No other loss may have this name.
        """
        # The call with no rows tells the names of terms and metrics, before rows are chosen and forwarded.
        no_rows = batch.select(batch.rows[:0])
        terms, metrics = loss_fn(LogProbs.of_no_rows(batch.mask.shape[1]), no_rows)
        only_policy_loss = terms.keys() == {"policy_loss"}
        rows = batch.rows_with_gradient(of_policy_loss_alone=only_policy_loss)
        names = list({"total_loss": 0.0, **terms, **metrics})
        sums = self.add_gradients(batch, rows, loss_fn, reference) or [0.0] * len(names)
        results, num_tokens = dict(zip(names, sums, strict=True)), int(batch.mask[rows].sum())
        for name, x in metrics.items():
            if x.ndim or not num_tokens:
                results[name] = results[name] / num_tokens if num_tokens else math.nan
        self.losses.append(results["total_loss"])
        return results

    def optimizer_step(self, max_grad_norm: float = math.inf) -> dict:
        """Take a step with the gradient, scaled down to max_grad_norm if it is larger, and clear it.

        returns  grad_norm, before scaling, and skipped: 1 if gradient or loss are not finite; then parameters
                 and learning-rate schedule stay as they were. Where the gradient is None, or all of it 0,
                 parameters stay as well
        """
        norm = self.clip_gradient(max_grad_norm)
        skipped = not (math.isfinite(norm) and math.isfinite(sum(self.losses)))
        if norm == 0:
            self.optimizer.zero_grad()                    # None: of zeros, momentum would move the parameters
        if not skipped:
            self.steps_begun += 1
            self.optimizer.step()
            self.scheduler.step()
        self.clear_gradient()
        return {"grad_norm": norm, "skipped": int(skipped)}

    # ---- their parts, which engine/ overrides --------------------------------------------------------------

    def forward_passes(
        self, rollout: Rollout, rows: Tensor, reference=None
    ) -> Iterator[tuple[Tensor, LogProbs]]:
        """Forward rows in micro-batches. Yield the rows of each, and their LogProbs."""
        for part_rows in micro_batches(rollout, rows, self.max_tokens):
            yield part_rows, self.forward(rollout, part_rows, reference)

    def forward(self, rollout: Rollout, rows: Tensor, reference=None) -> LogProbs:
        """Compute LogProbs (b, T) of some rows in one pass, with gradient unless it is turned off."""
        return completion_log_probs(
            self.model, rollout, rows, reference=reference and reference.model, value_head=self.value_head)

    def add_gradients(self, batch, rows: Tensor, loss_fn: Callable, reference) -> list[float]:
        """Forward and backward rows. Return the loss and the values that loss_fn returns, as sums."""
        sums = []
        for part_rows, new in self.forward_passes(batch.rollout, rows, reference):
            part = batch.select(part_rows, new.logp.device)
            terms, metrics = loss_fn(new, part)
            loss = sum(terms.values())
            self.backward(loss)
            values = {"total_loss": loss, **terms, **metrics}.values()
            sums.append(torch.stack([
                torch.where(part.mask, x, 0.0).sum() if x.ndim else x for x in values]).detach())
        return [sum(column) for column in zip(*(x.tolist() for x in sums), strict=True)]

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def clip_gradient(self, max_norm: float) -> float:
        """Scale the gradient down to max_norm. Return its norm before."""
        return float(torch.nn.utils.clip_grad_norm_(self.parameters, max_norm))

    def clear_gradient(self) -> None:
        """Clear the gradient, and the losses that it belongs to."""
        self.optimizer.zero_grad()
        self.losses = []

    # ---- what else a step asks of a policy -----------------------------------------------------------------

    def require_ratios_of_1(self, metrics: dict) -> None:
        """Raise RatioError if the trainer gives sampled tokens other probabilities than the sampler did.

        metrics  of the first update on a rollout: ratio_deviation, the mean of |policy / sampler - 1|, NaN
                 if nothing was forwarded. sampler_deviation, measured before the update, takes its place
        """
        name = "sampler_deviation" if "sampler_deviation" in metrics else "ratio_deviation"
        deviation = metrics[name]
        if deviation > self.ratio_tolerance:              # False for NaN
            raise RatioError(
                f"first ratios must be 1, but differ from it by {deviation:.2g} on average (at most "
                f"{self.ratio_tolerance:g}): the sampler gives tokens other probabilities than the trainer; "
                "see docs/troubleshooting.md.")

    def distribute(self, work: Callable, *lists: list) -> list:
        """Return [work(*lists)]; in several processes the results of all, each of its slice of the lists."""
        return [work(*lists)]

    def like(self, model) -> "Policy":
        """Return a policy of another model that is computed in the same way: a reference."""
        other = copy.copy(self)
        other.model = model
        other.train_with(optimizer=None, scheduler=None)
        return other

    @torch.no_grad()
    def update_reference(self, reference: "Policy", alpha: float) -> None:
        """Set reference = alpha * reference + (1 - alpha) * policy; alpha=0 copies the policy exactly."""
        for old, new in zip(reference.model.parameters(), self.model.parameters(), strict=True):
            old.lerp_(new.to(old), 1 - alpha)             # in its precision
