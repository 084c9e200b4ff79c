"""Prefix attention against attention written out densely: values, gradients, kernels, layouts, memory, architectures."""

import pytest
import torch
from conftest import ARCHITECTURES, CURRENT_ARCHITECTURES, PROMPTS, made_up_rollout, shared_log_probs

from config import GRPOConfig
from engine.models import recompute_activations, with_precision
from engine import attention_kernels, make_engine, prefix_attention
from engine.errors import CannotShare
from engine.attention_kernels import EfficientOnCUDA, FlashOnCUDA, Options, choose_kernel
from engine.packing import make_layout
from logprobs import completion_log_probs

# Two groups and a lone row: prompts of 5, 20 and 9 tokens, completions of 12, 3, 1, and 30, 7, and 8 behind the last prompt.
SEGMENTS = [(0, 5), (5, 12), (17, 3), (20, 1), (21, 20), (41, 30), (71, 7), (78, 17)]
BEHIND = {(5, 16): (0, 5), (41, 37): (21, 20)}
PROMPT_OF = {1: 0, 2: 0, 3: 0, 5: 4, 6: 4}                # segments


def layout_by_hand():
    """Positions (L,), layout, and the dense (L, L) rule of who sees whom, token by token."""
    positions, owner = [], []
    for number, (_, length) in enumerate(SEGMENTS):
        start = SEGMENTS[PROMPT_OF[number]][1] if number in PROMPT_OF else 0
        positions += range(start, start + length)
        owner += [number] * length
    prompts = [SEGMENTS[0], SEGMENTS[4], SEGMENTS[7]]
    completions = [SEGMENTS[number] for number in PROMPT_OF]
    layout = make_layout(torch.tensor(positions).numpy(), prompts, completions, BEHIND)
    sees = [
        [owner[j] in (owner[i], PROMPT_OF.get(owner[i])) and positions[j] <= positions[i] for j in range(len(owner))]
        for i in range(len(owner))
    ]
    return torch.tensor(positions), layout, torch.tensor(sees)


def dense(query, key, value, sinks, visible, positions, options):
    """Attention with one (L, L) mask, as a textbook has it."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
    scores = query @ key.mT * options.scaling
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if options.window:
        visible = visible & (positions[:, None] - positions < options.window)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(-1, -1, scores.shape[2], -1)], dim=-1)
    return (scores.softmax(-1)[..., : len(positions)] @ value).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 4, 13, 64])
@pytest.mark.parametrize("softcap,sinks,head_sizes", [
    (None, False, (8, 8)), (3.0, False, (8, 8)), (None, True, (8, 8)), (None, False, (8, 6)), (2.0, True, (8, 6)),
])
@pytest.mark.parametrize("heads,key_heads", [(4, 1), (4, 2), (3, 3)])
@pytest.mark.parametrize("chunk", [256, 5])
def test_values_and_gradients_are_those_of_dense_attention(
    window, softcap, sinks, head_sizes, heads, key_heads, chunk, monkeypatch,
):
    monkeypatch.setattr(attention_kernels, "QUERIES_PER_CHUNK", chunk)
    monkeypatch.setattr(attention_kernels, "SCORES_PER_CHUNK", 2**21 if chunk == 256 else 200)
    positions, layout, visible = layout_by_hand()
    draws = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=draws, dtype=torch.float64, requires_grad=True)

    size = len(positions)
    query, key = normal(1, heads, size, head_sizes[0]), normal(1, key_heads, size, head_sizes[0])
    value = normal(1, key_heads, size, head_sizes[1])
    sink, slopes = normal(heads) if sinks else None, normal(1, size, heads, head_sizes[1]).detach()
    options = Options(window, softcap, 0.4)
    leaves = [part for part in (query, key, value, sink) if part is not None]
    ours = layout.attend(None, query, key, value, source=key, sinks=sink, **options._asdict())
    theirs = dense(query, key, value, sink, visible, positions, options)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    for left, right in zip(*(torch.autograd.grad((x * slopes).sum(), leaves) for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("prompt_of", [[0, 0, 1, 1], [1, 0, 1]], ids=["in order", "ragged"])
def test_a_new_token_attends_to_its_prompt_and_its_own_columns_as_in_one_softmax(softcap, sinks, masked, prompt_of):
    """Two key heads with three query heads each, a row at a time."""
    draws, heads, repeats, size, rows = torch.Generator().manual_seed(0), 2, 3, 8, len(prompt_of)

    def normal(*shape):
        return torch.randn(*shape, generator=draws, dtype=torch.float64)

    query, keys, values = normal(rows, heads, repeats, size), normal(rows, heads, 5, size), normal(rows, heads, 5, size)
    prompt_keys, prompt_values = normal(2, heads, 7, size), normal(2, heads, 7, size)
    sink, options = normal(heads, repeats) if sinks else None, Options(None, softcap, 0.4)
    own_mask = torch.zeros(rows, 5, dtype=torch.float64)
    own_mask[1, 3:] = -1e30
    prompt_mask = torch.zeros(rows, 7, dtype=torch.float64)
    prompt_mask[:2, :4] = -1e30
    slots = [sum(p == prompt for p in prompt_of[:row]) + 2 * prompt for row, prompt in enumerate(prompt_of)]
    table = torch.zeros(4, dtype=torch.long).scatter(0, torch.tensor(slots), torch.arange(rows)).view(2, 2)
    siblings = prefix_attention.Siblings(table, torch.tensor(slots))
    masks = [mask[:, None].repeat_interleave(heads, dim=0) for mask in (prompt_mask, own_mask)]
    masks[0] = siblings.group(masks[0].expand(-1, repeats, -1), heads)
    flat = [x.flatten(0, 1) for x in (query, keys, values, prompt_keys, prompt_values)]
    found = prefix_attention.attend_to_prompt_and_own(*flat, masks[0] if masked else None, masks[1], None if sink is None else sink.flatten(), siblings, options)
    for row, prompt in enumerate(prompt_of):
        for head in range(heads):
            key, value = (torch.cat(x) for x in ((prompt_keys[prompt, head], keys[row, head]), (prompt_values[prompt, head], values[row, head])))
            scores = query[row, head] @ key.mT * 0.4
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            scores = scores + torch.cat([prompt_mask[row] * masked, own_mask[row]])
            scores = torch.cat([scores, sink[head][:, None]], dim=1) if sinks else scores
            expected = scores.softmax(dim=1)[:, :12] @ value
            torch.testing.assert_close(found.view(rows, heads, repeats, size)[row, head], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [None, 4, 13, 64])
@pytest.mark.parametrize("chunk", [256, 5])
def test_rounded_sizes_change_neither_values_nor_gradients_and_padding_is_finite(window, chunk, monkeypatch):
    """The layout that XLA would have, on a CPU: one block of prompts, one of completions, one of their prefixes."""
    monkeypatch.setattr(attention_kernels, "QUERIES_PER_CHUNK", chunk)
    positions, _, visible = layout_by_hand()
    size, rounded = len(positions), 128
    padded = torch.nn.functional.pad(positions, (0, rounded - size))
    prompts, completions = [SEGMENTS[0], SEGMENTS[4], SEGMENTS[7]], [SEGMENTS[number] for number in PROMPT_OF]
    layout = make_layout(padded.numpy(), prompts, completions, BEHIND, torch.device("xla"))
    assert len(layout.own) == 2 and len(layout.prefix) == 1
    draws = torch.Generator().manual_seed(0)
    leaves = [torch.randn(1, heads, rounded, 8, generator=draws, dtype=torch.float64) for heads in (4, 2, 2)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    slopes = torch.randn(1, size, 4, 8, generator=draws, dtype=torch.float64)
    options = Options(window, None, 0.4)
    ours = layout.attend(None, *leaves, source=None, sinks=None, **options._asdict())
    assert ours.isfinite().all()
    theirs = dense(*(x[:, :, :size] for x in leaves), None, visible, positions, options)
    torch.testing.assert_close(ours[:, :size], theirs, rtol=0, atol=1e-12)
    for left, right in zip(*(torch.autograd.grad((x[:, :size] * slopes).sum(), leaves) for x in (ours, theirs))):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [None, 13])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_would_run_on_cuda_has_the_right_arguments_and_shapes(window, dtype, monkeypatch):
    """With torch's descriptions of its CUDA operators, on tensors without numbers: that they run is not shown."""
    _, layout, _ = layout_by_hand()
    used = set()

    def choice(device, *args):
        used.add(choose_kernel("cuda", *args))
        return choose_kernel("cuda", *args)

    monkeypatch.setattr(prefix_attention, "choose_kernel", choice)
    leaves = [torch.empty(1, heads, 95, 64, dtype=dtype, device="meta", requires_grad=True) for heads in (4, 2, 2)]
    output = layout.attend(None, *leaves, source=None, sinks=None, window=window, softcap=None, scaling=0.125)
    gradients = torch.autograd.grad(output.sum(), leaves)
    assert output.shape == (1, 95, 4, 64) and output.dtype == dtype
    assert [part.shape for part in gradients] == [part.shape for part in leaves]
    assert (FlashOnCUDA if dtype == torch.bfloat16 else EfficientOnCUDA) in used


def test_a_pass_keeps_neither_a_mask_nor_a_prompts_keys_for_each_completion():
    """What autograd keeps of one layer: query, key, value, output and log-sum-exps, whatever the number of completions."""
    prompt, group, new = 64, 16, 8
    size = prompt + group * new
    completions = [(prompt + i * new, new) for i in range(group)]
    positions = torch.cat([torch.arange(prompt), torch.arange(prompt, prompt + new).repeat(group)])
    layout = make_layout(positions.numpy(), [(0, prompt)], completions, {(prompt, group * new): (0, prompt)})
    leaves = [torch.randn(1, heads, size, 16, requires_grad=True) for heads in (4, 2, 2)]
    kept = {}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = layout.attend(None, *leaves, source=None, sinks=None, window=20, softcap=None, scaling=0.25)
    assert sum(kept.values()) == 4 * size * ((4 + 2 + 2 + 4) * 16 + 4)
    del output


def log_probs_and_gradient(model, rollout, log_probs=shared_log_probs):
    model.zero_grad()
    slopes = torch.randn(rollout.completion_mask.shape, generator=torch.Generator().manual_seed(1))
    logp = log_probs(model, rollout).logp
    (logp * slopes).sum().backward()
    return logp.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


SHARED = {**ARCHITECTURES, **{name: build for name, build in CURRENT_ARCHITECTURES.items() if name not in ("qwen3_5", "lfm2")}}


@pytest.mark.parametrize("name", SHARED)
def test_shared_prompts_have_the_values_and_gradients_of_plain_rows(name):
    """Ragged groups, several in a pass, windows shorter than prompts and completions; also with recomputed activations."""
    torch.manual_seed(0)
    model = SHARED[name]().eval()
    rollout = made_up_rollout([5, 20, 1], [12, 3, 7, 1, 30, 30, 2, 5, 9, 8, 7, 6])
    plain, plain_gradient = log_probs_and_gradient(model, rollout, completion_log_probs)
    shared, gradient = log_probs_and_gradient(model, rollout)
    torch.testing.assert_close(shared, plain, rtol=1e-5, atol=1e-5)
    assert (gradient - plain_gradient).norm() / plain_gradient.norm() < 1e-5
    assert model.config.get_text_config()._attn_implementation != prefix_attention.NAME, "as it was before"
    recompute_activations(model)
    _, recomputed = log_probs_and_gradient(model, rollout)
    torch.testing.assert_close(recomputed, gradient, rtol=0, atol=0)
    _, plain_recomputed = log_probs_and_gradient(model, rollout, completion_log_probs)
    torch.testing.assert_close(plain_recomputed, plain_gradient, rtol=0, atol=0)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_in_16_bits_sampler_and_trainer_round_alike(architecture, tokenizer, precision):
    """With kernels of their own they would differ by 0.01 nat on average."""
    engine = make_engine("shared", with_precision(architecture[1], precision), tokenizer)
    config = GRPOConfig(generation_max_length=12, generation_temperature=1.0, generation_top_k=0, generation_top_p=1.0)
    rollout = engine.sample(PROMPTS, config, seeds=0)
    trained = engine.log_probs(rollout).logp
    assert (rollout.sampling_logp - trained).abs()[rollout.completion_mask].mean() < 4e-3              # 0.0014 on AVX2 alone


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
