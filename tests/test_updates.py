"""Updates on a rollout: the gradient is that of the whole step however it is cut, and every term does what it says."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from conftest import ARCHITECTURES, start_run
from torch.nn.functional import pad

import experience as experience_module
import train
from experience import minibatches, prepare_experience, sample_groups
from grpo import LOSS_TYPES, LOSSES, policy_loss
from logprobs import completion_log_probs, restrict_logits
from model import ValueHead, frozen_copy
from sample import Rollout, select_groups
from train import add_up_gradient

GRPO = ["--use_grpo", "--cold_start_steps", "0"]
# Every term there is, so that none can depend on how a step is cut.
EVERYTHING = "--use_kl_penalty --kl_penalty_coef 0.3 --entropy_coef 0.2 --loss_aggregation".split()


def off_policy(run, seed=0):
    """An experience whose ratios are far from 1, with a group of equal rewards and completions of every length."""
    torch.manual_seed(seed)
    rollout = sample_groups(run, next(run.batches)).rollout
    kept = torch.randint(1, rollout.completion_mask.shape[1] + 1, (len(rollout.completions), 1))
    mask = rollout.completion_mask & (torch.arange(rollout.completion_mask.shape[1]) < kept)
    noise = 0.3 * torch.randn(mask.shape)
    rollout = replace(rollout, completion_mask=mask, sampling_logp=torch.where(mask, rollout.sampling_logp + noise, 0.0))
    rewards = torch.randn(len(rollout.prompt_ids), run.config.grpo.num_completions_per_prompt)
    rewards[1] = 0.7
    return prepare_experience(run, rollout, rewards)[0]


def gradient(run, experience, *parts):
    """All gradients in one vector, in float64, of add_up_gradient called for each of the parts, or for all rows at once."""
    run.model.zero_grad()
    if run.value_head is not None:
        run.value_head.zero_grad()
    for rows in parts or [torch.arange(len(experience.mask))]:
        losses = add_up_gradient(run, experience, rows)
    parameters = [*run.model.parameters(), *(run.value_head.parameters() if run.value_head is not None else [])]
    return torch.cat([p.grad.flatten() for p in parameters]).double(), losses


def differ(left, right):
    return float((left - right).norm() / right.norm())


def reordered(experience, groups):
    """The same experience with its groups in another order."""
    size = len(experience.mask) // len(experience.rollout.prompt_ids)
    rows = (groups[:, None] * size + torch.arange(size)).flatten()

    def move(tensor):
        return None if tensor is None else tensor[rows]

    old = experience.rollout
    rollout = Rollout(
        old.prompt_ids[groups], old.prompt_mask[groups], move(old.completion_ids), move(old.completion_mask),
        move(old.sampling_logp), move(old.finished), [old.completions[row] for row in rows],
    )
    tensors = {
        name: move(getattr(experience, name))
        for name in ("mask", "advantages", "old_logp", "weights", "reference_logp", "old_values", "returns")
    }
    return replace(experience, rollout=rollout, **tensors)


def padded(experience, left, right):
    """The same experience with more padding before the prompts and after the completions, and garbage in it."""
    old = experience.rollout

    def wider(tensor, value):
        return tensor if tensor is None or tensor.shape[1] == 1 else pad(tensor, (0, right), value=value)

    rollout = replace(
        old, prompt_ids=pad(old.prompt_ids, (left, 0), value=7), prompt_mask=pad(old.prompt_mask, (left, 0)),
        completion_ids=wider(old.completion_ids, 5), completion_mask=wider(old.completion_mask, False),
        sampling_logp=wider(old.sampling_logp, -3.0),
    )
    return replace(
        experience, rollout=rollout, mask=wider(experience.mask, False), advantages=wider(experience.advantages, 9.0),
        old_logp=wider(experience.old_logp, math.nan), reference_logp=wider(experience.reference_logp, 2.0),
        old_values=wider(experience.old_values, 4.0), returns=wider(experience.returns, -4.0),
    )


def small_model(run, architecture="gemma3"):
    """A model of two narrow layers in place of the built-in one, so that rounding has less to add up."""
    torch.manual_seed(0)
    run.model = ARCHITECTURES[architecture]().eval()
    if run.reference is not None:                         # one that differs, or its gradient would vanish
        run.reference = frozen_copy(run.model)
        with torch.no_grad():
            run.reference.get_output_embeddings().weight.mul_(1.5)
    if run.value_head is not None:
        run.value_head = ValueHead(32)
        torch.nn.init.normal_(run.value_head.layers[-1].weight)


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=["float32", "float64"])
@pytest.mark.parametrize("extra", [[], [*EVERYTHING, ""], [*EVERYTHING, "sequence_mean", "--use_value_head", "--value_coef", "1"]],
                         ids=["loss alone", "with KL and entropy", "with a value head too"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_gradient_of_a_step_does_not_depend_on_how_it_is_cut_padded_or_ordered(tmp_path, loss_type, extra, dtype, tolerance):
    run = start_run(tmp_path, *GRPO, "--loss_type", loss_type, *extra)
    small_model(run, "gemma3" if dtype == torch.float32 else "gpt2")             # Gemma's norms are in float32 whatever the rest
    experience = off_policy(run)
    for module in run.model, run.reference, run.value_head:
        if module is not None:
            module.to(dtype)
    whole, losses = gradient(run, experience)
    assert whole.norm() > 0 and losses["ratio_deviation"] > 0.1
    num_rows = len(experience.mask)
    variants = {
        "padding": (padded(experience, 3, 5), None),
        "permuted groups": (reordered(experience, torch.tensor([2, 0, 3, 1])), None),
        "permuted rows": (experience, torch.randperm(num_rows)),
    }
    for name, (variant, rows) in variants.items():
        same, _ = gradient(run, variant, *([] if rows is None else [rows]))
        assert differ(same, whole) < tolerance, f"{name}: {differ(same, whole)}"
    for budget, shared in (200, True), (61, True), (1, True), (150, False):
        run.config = replace(run.config, training=replace(run.config.training, max_tokens_per_forward=budget))
        run.shared_prompt = shared
        cut, parts = gradient(run, experience)
        assert differ(cut, whole) < tolerance, f"{budget=} {shared=}: {differ(cut, whole)}"
        for metric, value in losses.items():
            assert parts[metric] == pytest.approx(value, rel=1e-4, abs=1e-6), metric
