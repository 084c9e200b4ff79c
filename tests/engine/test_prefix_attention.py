"""Prefix attention against attention written out densely: values, gradients, layouts. Packing of rows."""

import pytest
import torch
from conftest import made_up_rollout
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

from engine import packing, prefix_attention
from engine.errors import CannotShare
from engine.packing import micro_batches_of_groups, pack_groups

# Two groups and a lone row: prompts of 5, 20 and 9 tokens, completions of 12, 3, 1, and 30, 7, and 8.
PROMPTS_AT = [(0, 5), (5, 20), (25, 9)]
COMPLETIONS_AT = {(34, 12): 0, (46, 3): 0, (49, 1): 0, (50, 30): 1, (80, 7): 1, (87, 8): 2}      # number of the prompt
PAIRS = [(PROMPTS_AT[prompt], own) for own, prompt in COMPLETIONS_AT.items()]


def layout_by_hand():
    """Positions (L,) and the dense (L, L) rule of who sees whom, token by token."""
    segments = [(None, own) for own in PROMPTS_AT] + PAIRS
    positions, owner = [], []
    for prompt, (start, length) in segments:
        first = prompt[1] if prompt else 0
        positions += range(first, first + length)
        owner += [(start, prompt and prompt[0])] * length
    sees = [
        [owner[j][0] in owner[i] and positions[j] <= positions[i] for j in range(len(owner))] for i in range(len(owner))]
    return torch.tensor(positions), torch.tensor(sees)


def dense(query, key, value, sinks, visible, positions, window, softcap):
    """Attention with one (L, L) mask, as a textbook has it."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
    scores = query @ key.mT * 0.4
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if window:
        visible = visible & (positions[:, None] - positions < window)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(-1, -1, scores.shape[2], -1)], dim=-1)
    return (scores.softmax(-1)[..., : len(positions)] @ value).transpose(1, 2)


class Layer(torch.nn.Module):
    is_causal = True


@pytest.mark.parametrize("window", [None, 4, 13, 64])
@pytest.mark.parametrize("source,name,softcap,sinks", [
    (modeling_gemma2, "sdpa", None, False), (modeling_gemma2, "sdpa", 3.0, False), (modeling_gpt_oss, "eager", None, True)])
@pytest.mark.parametrize("heads,key_heads", [(4, 1), (4, 2), (3, 3)])
@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_values_and_gradients_are_those_of_dense_attention(
    window, source, name, softcap, sinks, heads, key_heads, device, monkeypatch,
):
    """On XLA with its rounded sizes, one block of prompts and one of completions: padding is finite and changes nothing."""
    monkeypatch.setattr(packing, "copy_together", lambda tensors, device: tensors)
    positions, visible = layout_by_hand()
    size, rounded = len(positions), len(positions) if device == "cpu" else 128
    layout = packing.make_layout(PROMPTS_AT, PAIRS, torch.device(device))
    assert device == "cpu" or len(layout.blocks) == 2
    draws = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=draws, dtype=torch.float64, requires_grad=True)

    leaves = [normal(1, count, rounded, 8) for count in (heads, key_heads, key_heads)]
    sink, slopes = normal(heads) if sinks else None, normal(1, size, heads, 8).detach()
    monkeypatch.setattr(Layer, "__module__", source.__name__)
    module = Layer()
    module.num_key_value_groups, module.sinks = heads // key_heads, sink
    ours, _ = prefix_attention.prefix_attention(
        name, module, *leaves, token_layout=layout, scaling=0.4, sliding_window=window, softcap=softcap, s_aux=sink)
    assert ours.isfinite().all()
    theirs = dense(*(x[:, :, :size] for x in leaves), sink, visible, positions, window, softcap)
    atol = 1e-6 if softcap else 1e-12                     # Gemma 2 has a softmax in float32
    torch.testing.assert_close(ours[:, :size], theirs, rtol=0, atol=atol)
    leaves += [sink] if sinks else []
    for left, right in zip(*(torch.autograd.grad((x[:, :size] * slopes).sum(), leaves) for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=10 * atol)


def test_autograd_keeps_no_copy_of_keys_for_each_query_head():
    """Rows of 64 + 8 tokens, 2 query heads for each of 2 key heads: query, output, keys and values once, a mask, log-sum-exps."""
    prompt, group, new = 64, 16, 8
    completions = [((0, prompt), (prompt + i * new, new)) for i in range(group)]
    layout = packing.make_layout([(0, prompt)], completions)
    leaves = [torch.randn(1, heads, prompt + group * new, 16, requires_grad=True) for heads in (4, 2, 2)]
    kept = {}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    module = Layer()
    module.num_key_value_groups = 2
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output, _ = prefix_attention.prefix_attention("sdpa", module, *leaves, token_layout=layout, scaling=0.25)
    keys = 2 * group * (prompt + new) * 2 * 16 * 4
    assert keys < sum(kept.values()) < 1.8 * keys
    del output


def test_a_layer_that_is_not_given_the_layout_is_named(shared):
    rollout = made_up_rollout([5], [4, 4])
    layer = shared.model.base_model.layers[0].self_attn
    right = layer.forward
    layer.forward = lambda *args, token_layout, **kwargs: right(*args, **kwargs)
    with pytest.raises(CannotShare, match="Gemma3Attention was not given the layout"):
        shared.log_probs(rollout)


def test_a_window_that_does_not_arrive_is_noticed_however_long_it_is(shared):
    """On prompts shorter than the window no number would tell."""
    shared.model.config.sliding_window = 4096             # the layers have kept 5
    with pytest.raises(CannotShare, match="attention layers by window"):
        shared.log_probs(made_up_rollout([5], [4, 4]))


def test_rows_of_like_length_share_a_block():
    rollout = made_up_rollout([4, 4], [10, 10, 9, 2])
    layout = pack_groups(rollout, torch.arange(4)).layout
    assert [(*block.tokens.shape, block.prompts.shape[1]) for block in layout.blocks] == [(2, 4, 0), (3, 10, 4), (1, 2, 4)]


def test_a_batch_is_closed_when_one_more_row_would_exceed_the_budget():
    """Rows of 10 + 5 tokens: siblings share a prompt, and one token less than needed splits them."""
    rollout = made_up_rollout([10, 10], [5, 5, 5, 5])
    rows = torch.arange(4)
    assert [len(b) for b in micro_batches_of_groups(rollout, rows, 40)] == [4]
    assert [len(b) for b in micro_batches_of_groups(rollout, rows, 39)] == [2, 2]
    assert [len(b) for b in micro_batches_of_groups(rollout, rows, 20)] == [2, 2]
    assert [len(b) for b in micro_batches_of_groups(rollout, rows, 19)] == [1, 1, 1, 1]
    assert len(micro_batches_of_groups(rollout, rows, 1000, min_batches=3)) >= 3
