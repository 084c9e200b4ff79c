"""
The policy of policy.py on any device, in 16 bits, and over several processes. shared.py extends it.

    processes        weights may be sharded; each process samples, scores and forwards some of the rows
    float16          gradients are scaled by a GradScaler
    XLA              every forward pass is one program; gradients are cleared to zeros
    memory           when it runs out, the call is repeated with half as many tokens or completions at once
"""

import copy
import math
import traceback
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from engine.devices import Ranks, cut_graph, num_processes
from engine.errors import first_line, is_out_of_memory
from engine.models import is_exact, moved_to, precision_of
from engine.sharding import forward_pass, gathered_weights, reshard, sum_and_clip_gradient
from engine.text_model import has_adapter, trainable_parameters
from logprobs import LogProbs, completion_lengths, completion_log_probs, micro_batches
from policy import Policy
from sample import Rollout


class DevicePolicy(Policy):
    """A policy on any device and any number of processes, which all call its methods in the same order."""

    split = staticmethod(micro_batches)                   # rows -> micro-batches, the same in all processes

    def __init__(self, model, tokenizer, *, max_tokens: int = 2048):
        super().__init__(model, tokenizer, max_tokens=max_tokens)
        self.device = next(model.parameters()).device
        self.ranks = Ranks()
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision_of(model) == "float16")
        self.sampler = None                               # such as vLLM, see vllm_engine.py; None: the model
        self.on_less_memory = lambda flag, half, line: print(line)       # called by halving

    @property
    def same_arithmetic(self) -> bool:
        return self.sampler is None

    @property
    def ratio_tolerance(self) -> float:
        """Return the limit of the mean |ratio - 1| on policy: higher if the sampler rounds differently."""
        return (0.01 if is_exact(self.model) else 0.1) * (1 if self.same_arithmetic else 3)

    # ---- the four operations -------------------------------------------------------------------------------

    def sample(self, prompts: list, config, seeds, *, num_completions=None, reply=None) -> Rollout:
        """As Policy.sample, for prompts of this process. Calls reply.restart() before a repetition."""
        group_size = num_completions or config.num_completions_per_prompt
        at_once = getattr(config, "generation_batch_size", 0) or len(prompts) * group_size

        def attempt(at_once: int) -> Rollout:
            sample_batches = self.sampler.sample if self.sampler else self.sample_batches
            settings = copy.copy(config)                  # of any class; a GRPOConfig is frozen
            object.__setattr__(settings, "generation_batch_size", at_once)
            return sample_batches(prompts, settings, seeds, num_completions=group_size, reply=reply)

        restart = getattr(reply, "restart", None)
        return self.halving("generation_batch_size", at_once, group_size, attempt, restart)

    def sample_batches(self, prompts: list, config, seeds, **options) -> Rollout:
        """Sample config.generation_batch_size completions at a time."""
        if self.device.type == "xla":
            raise ValueError(
                "--engine=plain: not supported on XLA, which would compile its cache for every token; remove "
                "it, or use a model without recurrent layers")
        return super().sample(prompts, config, seeds, **options)

    def log_probs(self, rollout: Rollout, rows: Tensor | None = None, *, reference=None) -> LogProbs:
        """As Policy.log_probs. Each process forwards some of the rows, and gets the results of all."""
        compute = partial(super().log_probs, rollout, rows, reference=reference)
        with moved_to(self.model, self.device):           # from the CPU, with --reference_offload
            results = self.halving_max_tokens(rollout, compute)
        return LogProbs(**{name: self.ranks.sum(x) for name, x in results.computed().items()})

    def add_gradients(self, batch, rows: Tensor, loss_fn: Callable, reference) -> dict[str, float]:
        """As Policy.add_gradients, over all processes."""
        compute = partial(super().add_gradients, batch, rows, loss_fn, reference)
        if self.losses:                                   # repeating would lose their gradient
            sums = compute()
        else:
            sums = self.halving_max_tokens(batch.rollout, compute, self.clear_gradient)
        over_ranks = self.ranks.sum(torch.tensor([*sums.values()], dtype=torch.float64)).tolist()
        return dict(zip(sums, over_ranks, strict=True))

    def optimizer_step(self, max_grad_norm: float = math.inf) -> dict:
        """As Policy.optimizer_step. With float16 returns loss_scale as well."""
        scaled = self.scaler.is_enabled() and any(p.grad is not None for p in self.trained_parameters)
        if scaled:                                        # the scaler raises without a gradient
            self.scaler.unscale_(self.optimizer)
        result = super().optimizer_step(max_grad_norm)
        if scaled:
            self.scaler.update()
        return result | ({"loss_scale": self.scaler.get_scale()} if self.scaler.is_enabled() else {})

    # ---- parts of the operations ---------------------------------------------------------------------------

    def forward_passes(self, rollout: Rollout, rows: Tensor, reference=None) -> Iterator[tuple]:
        """As Policy.forward_passes, for the micro-batches of this process.

        A pass of a sharded model needs all processes. A process that has no micro-batch left repeats the last
        one, so that collectives match, and yields a result without rows.
        """
        parts = self.split(rollout, rows, self.max_tokens, self.ranks.size)
        cut_graph(self.device)
        for first in range(0, len(parts), self.ranks.size):
            index = first + self.ranks.rank
            part = parts[min(index, len(parts) - 1)]
            new = self.forward(rollout, part, reference)
            if index < len(parts):
                yield part, new
            else:
                yield part[:0], LogProbs(**{name: x[:0] for name, x in new.computed().items()})
            cut_graph(self.device)

    def forward(self, rollout: Rollout, rows: Tensor, reference=None) -> LogProbs:
        reference_model = None if reference is None else reference.model
        return completion_log_probs(
            self.model, rollout, rows, reference=reference_model, value_head=self.value_head,
            run_forward=forward_pass)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def clip_gradient(self, max_norm: float) -> float:
        return sum_and_clip_gradient(self.trained_parameters, max_norm)

    def clear_gradient(self) -> None:
        """As Policy.clear_gradient; on XLA to zeros, so that the program stays the same."""
        self.optimizer.zero_grad(set_to_none=self.device.type != "xla")
        self.losses = []
        cut_graph(self.device)

    # ---- memory --------------------------------------------------------------------------------------------

    def halving_max_tokens(self, rollout: Rollout, compute: Callable, before_repeat: Callable | None = None):
        """Return compute(); as in halving, halve self.max_tokens whenever memory runs out."""
        def attempt(max_tokens: int):
            self.max_tokens = max_tokens
            return compute()

        longest = rollout.prompt_mask.sum(dim=1).max() + completion_lengths(rollout.completion_mask).max()
        return self.halving("max_tokens_per_forward", self.max_tokens, int(longest), attempt, before_repeat)

    def halving(
        self, flag: str, value: int, least: int, compute: Callable, before_repeat: Callable | None = None
    ):
        """Return compute(value). Whenever memory runs out, halve the value and compute again.

        Completions and gradients do not depend on how many are computed at once, so results are equal up to
        rounding. With several processes the error is raised: one process cannot repeat a collective alone.

        flag   the name of the value, for on_less_memory;  least  the lower limit of the value
        """
        while True:
            try:
                return compute(value)
            except Exception as error:
                half = max(value // 2, min(value, least))
                if not is_out_of_memory(error) or num_processes() > 1 or half == value:
                    raise
                traceback.clear_frames(error.__traceback__)                      # frees the pass's tensors
                line = f"{first_line(error)}: --{flag} {value} -> {half}, trying again"
                self.on_less_memory(flag, half, line)
            value = half
            if before_repeat:
                before_repeat()

    # ---- other methods -------------------------------------------------------------------------------------

    def sampling(self):
        """Return a context in which weights stay the same between calls of sample. All processes enter it."""
        return self.sampler.sampling() if self.sampler else gathered_weights(self.model)

    def map_over_processes(self, work: Callable, *lists: list) -> list:
        with self.sampling():
            return self.ranks.gather(work, *lists)

    def like(self, model) -> "DevicePolicy":
        """As Policy.like. The model may be stored on another device; it is moved to this one when used."""
        other = super().like(model)
        other.sampler = None
        return other

    def update_reference(self, reference: Policy, alpha: float) -> None:
        """As Policy.update_reference; if an adapter is trained, the reference is an adapter too."""
        reshard(self.model)
        reshard(reference.model)
        trained = self
        if has_adapter(self.model):
            trained = self.like(torch.nn.ParameterList(trainable_parameters(self.model)))
        Policy.update_reference(trained, reference, alpha)


def runs_in_core(model) -> bool:
    """Return True if policy.py itself can run a model: in one process, on a CPU, in float32, all weights."""
    is_on_cpu = next(model.parameters()).device.type == "cpu"
    in_float32 = precision_of(model) == "float32" and not has_adapter(model)
    return num_processes() == 1 and is_on_cpu and in_float32
