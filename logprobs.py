"""
Log-probabilities of completions under a model: what the policy, the reference and any later version of them say about
tokens that were sampled before.

Two ideas live here. A group shares one prompt, so the prompt is forwarded once with its G completions packed behind it,
under a mask that keeps siblings apart. And the vocabulary is large, so the head runs in chunks of a few hundred tokens,
recomputed in the backward pass: no (tokens, V) tensor outlives a chunk.

Left out on purpose: several groups in one pack (each group is a row of its own here, padded to the longest). Models
whose layers carry state from token to token cannot be packed: the start-up check finds that, and shared_prompt=False
forwards ordinary rows.
Shapes: B rows of T completion tokens, K packs of L tokens, N completion tokens in all, H hidden size, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

HEAD_CHUNK = 512                # tokens; at V = 262144 a float32 chunk of logits takes half a gigabyte


@dataclass
class LogProbs:
    """What a policy says about completion tokens, with rows in the order they were asked for."""

    logp: Tensor                # (rows, T) nats, with gradient where the model has one; 0 where completion_mask is False
    entropy: Tensor             # (rows, T) nats, entropy of the same distribution; 0 where completion_mask is False
    kl: Tensor | None = None    # (rows, T) nats, KL(policy || reference) over the whole vocabulary, if there is a reference
    values: Tensor | None = None        # (rows, T) points expected before each token, if there is a value head


def restrict_logits(logits: Tensor, *, temperature: float, top_k: int, top_p: float, chosen: Tensor | None = None) -> Tensor:
    """The logits of the distribution that is really sampled from; a softmax of the result is the policy.

    Divides by the temperature, keeps the top_k likeliest tokens, and of those the fewest that hold at least top_p of
    the probability (arXiv:1904.09751 sec. 3.1). The rest gets -inf.

    logits       (N, V);  top_k=0 and top_p=1 keep everything
    chosen       (N,) token ids that belong to the kept ones whatever happens: they were sampled, and rounding
                 between two forward passes must not make them impossible
    returns      (N, V) float32 (float64 for float64 logits)
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    if top_k <= 0 and top_p >= 1:
        return logits
    with torch.no_grad():
        k = min(top_k, logits.shape[-1]) if top_k > 0 else logits.shape[-1]
        ranked = logits.topk(k, dim=-1).values                                   # (N, k), descending
        probs = ranked.softmax(dim=-1)
        before = probs.cumsum(dim=-1) - probs                                    # probability of all likelier tokens
        kept = (before < top_p).sum(dim=-1, keepdim=True).clamp(min=1)           # (N, 1)
        outside = logits < ranked.gather(-1, kept - 1)                           # (N, V); equal logits stay together
        if chosen is not None:
            outside.scatter_(-1, chosen[:, None], False)
    return logits.masked_fill(outside, -torch.inf)


def completion_log_probs(
    model, rollout, rows: Tensor | None = None, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
    shared_prompt: bool = True, reference=None, value_head=None,
) -> LogProbs:
    """log p(completion token | everything before it) under the policy: model, temperature and kept support together.

    rollout        prompt_ids, prompt_mask (P, Tp), completion_ids, completion_mask (B, T), with B = P * G
    rows           which of the B rows, in any order; all of them by default
    shared_prompt  forward each prompt once for all its rows; False forwards one row per completion. The same numbers
                   to rounding, unless the model's layers carry state.
    reference      another model of the same vocabulary, for the exact KL at every token, over the tokens that the policy
                   keeps, with both distributions normalised over those; forwarded here, without gradient
    value_head     a module from hidden states (N, H) to points (N,)
    """
    rows = torch.arange(len(rollout.completion_ids)) if rows is None else rows.cpu()
    pack = pack_rows(rollout, rows, shared_prompt)
    device = next(model.parameters()).device
    inputs = dict(
        input_ids=pack.ids.to(device),
        position_ids=pack.positions.to(device),
        attention_mask=attention_masks(model, pack) if shared_prompt else (pack.segments >= 0).to(device),
        use_cache=False,
    )
    mask = rollout.completion_mask[rows]                                         # (b, T)
    chosen = rollout.completion_ids[rows][mask].to(device)                       # (N,)
    predictor = pack.predictor[mask].to(device)                                  # (N,)
    hidden = model.base_model(**inputs).last_hidden_state.flatten(0, 1)[predictor]               # (N, H)
    reference_hidden = None
    if reference is not None:
        with torch.no_grad():
            reference_hidden = reference.base_model(**inputs).last_hidden_state.flatten(0, 1)[predictor]

    policy = dict(temperature=temperature, top_k=top_k, top_p=top_p)
    parts = []
    for i in range(0, len(chosen), HEAD_CHUNK):
        chunk = slice(i, i + HEAD_CHUNK)
        other = None if reference is None else reference_hidden[chunk]
        parts.append(checkpoint(
            head_log_probs, model, hidden[chunk], chosen[chunk], policy, reference, other, use_reentrant=False
        ))
    logp, entropy, kl = (torch.cat(part) for part in zip(*parts, strict=True))   # (N,) each
    where, empty = mask.to(device), logp.new_zeros(mask.shape)
    return LogProbs(
        logp=empty.masked_scatter(where, logp),
        entropy=empty.masked_scatter(where, entropy),
        kl=None if reference is None else empty.masked_scatter(where, kl),
        values=None if value_head is None else empty.masked_scatter(where, value_head(hidden).to(logp.dtype)),
    )


def head_log_probs(model, hidden: Tensor, chosen: Tensor, policy: dict, reference=None, reference_hidden=None):
    """hidden (N, H), the tokens chosen next (N,) -> log-probabilities, entropies, exact KLs (0 without a reference).

    policy   temperature, top_k and top_p, as for restrict_logits;  returns (N,) nats each, float32
    """
    logits = restrict_logits(logits_of(model, hidden), **policy, chosen=chosen)
    log_probs = logits.log_softmax(dim=-1)
    kept = log_probs > -torch.inf
    probs, surprise = log_probs.exp(), torch.where(kept, log_probs, 0.0)         # 0 * log 0 is 0
    logp, entropy = log_probs.gather(-1, chosen[:, None])[:, 0], -(probs * surprise).sum(dim=-1)
    if reference is None:
        return logp, entropy, torch.zeros_like(logp)
    with torch.no_grad():
        reference_logits = logits_of(reference, reference_hidden).to(logits.dtype) / policy["temperature"]
        reference_logp = reference_logits.masked_fill(~kept, -torch.inf).log_softmax(dim=-1)
    return logp, entropy, (probs * torch.where(kept, log_probs - reference_logp, 0.0)).sum(dim=-1)


def logits_of(model, hidden: Tensor) -> Tensor:
    """The model's own way from final hidden states (N, H) to logits (N, V), with its scaling and soft cap.

    transformers offers no public call for this step; the start-up check compares it with the model's forward pass.
    """
    logits = model.get_output_embeddings()(hidden)
    config = model.config.get_text_config()
    logits = logits * getattr(config, "logit_scale", 1.0)                        # Cohere
    logits = logits / getattr(config, "logits_scaling", 1.0)                     # Granite
    cap = getattr(config, "final_logit_softcapping", None)                       # Gemma 2
    return logits if cap is None else torch.tanh(logits / cap) * cap


# ---- packing -------------------------------------------------------------------------------------------------------


@dataclass
class Pack:
    """K sequences of L tokens: a prompt and behind it one or more of its completions, each right-padded to L."""

    ids: Tensor                 # (K, L)
    positions: Tensor           # (K, L): 0, 1, ... over the prompt, then going on from it afresh in every completion
    segments: Tensor            # (K, L): 0 prompt, 1, 2, ... its completions, -1 padding
    predictor: Tensor           # (rows, T): index into the K * L hidden states of the one that predicts this token


def pack_rows(rollout, rows: Tensor, shared_prompt: bool) -> Pack:
    """Lay out the given rows of a rollout, siblings behind one copy of their prompt if shared_prompt."""
    num_prompts, num_rows = len(rollout.prompt_ids), len(rollout.completion_ids)
    group_size = num_rows // num_prompts
    lengths = completion_lengths(rollout.completion_mask)
    packs: dict[int, list[int]] = {}                # prompt (or row) -> where its completions stand in `rows`
    for index, row in enumerate(rows.tolist()):
        packs.setdefault(row // group_size if shared_prompt else row, []).append(index)

    prompts = [ids[mask] for ids, mask in zip(rollout.prompt_ids, rollout.prompt_mask, strict=True)]
    ids, positions, segments = [], [], []
    predictor = torch.zeros(len(rows), rollout.completion_ids.shape[1], dtype=torch.long)
    members = [[(index, int(rows[index])) for index in pack] for pack in packs.values()]
    sizes = [len(prompts[m[0][1] // group_size]) + sum(int(lengths[row]) for _, row in m) for m in members]
    for k, pack in enumerate(members):
        prompt = prompts[pack[0][1] // group_size]
        pieces, places, owners = [prompt], [torch.arange(len(prompt))], [torch.zeros(len(prompt), dtype=torch.long)]
        start = len(prompt)
        for segment, (index, row) in enumerate(pack, start=1):
            length = int(lengths[row])
            pieces.append(rollout.completion_ids[row, :length])
            places.append(len(prompt) + torch.arange(length))
            owners.append(torch.full((length,), segment))
            # Token t is predicted one token earlier; the first one by the end of the prompt, wherever it stands.
            predictor[index, :length] = k * max(sizes) + torch.cat(
                [torch.tensor([len(prompt) - 1]), start + torch.arange(length - 1)]
            )[:length]
            start += length
        ids.append(torch.cat(pieces))
        positions.append(torch.cat(places))
        segments.append(torch.cat(owners))
    pad = torch.nn.utils.rnn.pad_sequence
    return Pack(pad(ids, True), pad(positions, True), pad(segments, True, padding_value=-1), predictor)


def attention_masks(model, pack: Pack) -> Tensor | dict[str, Tensor]:
    """Additive masks (K, 1, L, L) for transformers: 0 where a token may look, the lowest number where not.

    A completion sees its prompt and itself up to the present; windows of sliding layers are measured in positions, so
    that it makes no difference how many siblings stand in between. Models with several kinds of layers take a dict.
    """
    weight = next(model.parameters())
    segments, positions = pack.segments.to(weight.device), pack.positions.to(weight.device)
    query, key = segments[:, :, None], segments[:, None, :]
    distance = positions[:, :, None] - positions[:, None, :]                     # (K, L, L)
    # Padding sees itself: a softmax over nothing would be NaN, and NaN spreads through the backward pass.
    visible = ((key == query) | (key == 0) & (query > 0)) & (distance >= 0)

    def additive(allowed):
        # In the model's own precision: torch's scaled_dot_product_attention misreads a float32 mask beside float64 queries.
        mask = torch.zeros(allowed.shape, dtype=weight.dtype, device=weight.device)
        return mask.masked_fill(~allowed, torch.finfo(weight.dtype).min)[:, None]

    config = model.config.get_text_config()
    layer_types, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    sliding = visible & (distance < window) if window else visible
    if layer_types is None:
        return additive(sliding)                          # Mistral: a window in every layer
    masks = {"full_attention": visible, "sliding_attention": sliding}
    return {name: additive(masks[name]) for name in set(layer_types)}


def completion_lengths(completion_mask: Tensor) -> Tensor:
    """(B,) tokens up to and including the last one that the policy chose; what follows it predicts nothing."""
    steps = torch.arange(1, completion_mask.shape[1] + 1, device=completion_mask.device)
    return (completion_mask * steps).amax(dim=1)


def micro_batches(rollout, rows: Tensor, max_tokens: int, shared_prompt: bool = True) -> list[Tensor]:
    """Split rows into batches of at most max_tokens padded tokens, siblings together where they fit.

    Longest first, so that packs of like length share a batch. A single completion longer than max_tokens gets a batch
    of its own. Any split gives the same gradient, since losses take their denominators from the whole step.
    """
    group_size = len(rollout.completion_ids) // len(rollout.prompt_ids)
    lengths = completion_lengths(rollout.completion_mask).tolist()
    prompt_lengths = rollout.prompt_mask.sum(dim=1).tolist()
    packs: list[tuple[int, list[int]]] = []                                      # (tokens, rows)
    open_pack: dict[int, int] = {}                                               # prompt -> its pack still being filled
    for row in rows.tolist():
        prompt = row // group_size
        at = open_pack.get(prompt)
        if not shared_prompt or at is None or packs[at][0] + lengths[row] > max_tokens:
            open_pack[prompt] = len(packs)
            packs.append((prompt_lengths[prompt] + lengths[row], [row]))
        else:
            packs[at] = (packs[at][0] + lengths[row], [*packs[at][1], row])
    packs.sort(key=lambda pack: -pack[0])
    batches: list[list[int]] = []
    longest = count = 0
    for tokens, members in packs:
        if not batches or (count + 1) * longest > max_tokens:
            batches.append([])
            longest, count = tokens, 0
        batches[-1] += members
        count += 1
    return [torch.tensor(batch) for batch in batches]
