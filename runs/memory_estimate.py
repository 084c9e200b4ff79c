"""
Estimates of the tokens and the memory of a step, before any weights are loaded, and flags that follow them.

    python train.py --use_grpo --estimate --model_path FOLDER_OR_ID --memory_gb 24 --mesh fsdp=8

They are for the worst case, in which every completion reaches the length limit. Weights, gradients, AdamW's
state and the reference are counted. A layer keeps what goes into its matrices and comes out of them; the
other tensors of a training pass and of sampling are taken to be shares of that. The constants were fitted to
the bytes of real passes (tests/runs/test_memory_estimate.py).
Left out on purpose: the states of recurrent layers; fragments of an accelerator's memory.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from itertools import product

import torch
from transformers import AutoConfig, PreTrainedModel

from config import Config, ModelConfig
from engine.adapters import add_adapter, has_adapter, trainable_parameters
from engine.chunked_head import chunk_size
from engine.devices import available_gb, best_device
from engine.errors import first_line
from engine.model_files import adapter_settings, auto_class, check_model_path
from engine.precision import matrices_of_layers, precision_of, with_precision
from engine.recomputation import layers_of
from engine.text_model import freeze_towers, text_model
from model import attention_options, byte_tokenizer, tiny_gemma
from runs.reference import config_of_reference

FULL = 0.9                      # use at most this share of the memory: fragments and CUDA's context need some
PASS_TOKENS = 8192, 4096, 2048  # defaults of --max_tokens_per_forward on an accelerator, the best one first
# A pass takes this many times its bytes of a CPU's heap. glibc cannot reuse every freed block for an aligned
# one of the same size, and an adapter's passes free many between the tensors that they keep.
FRAGMENTS, FRAGMENTS_WITH_ADAPTER = 1.1, 1.8
HEAP = 5e8                      # bytes that passes on a CPU took beyond that, as measured (docs/scale.md)
LOGITS = 6.5                    # tensors of the size of logits that exist at once, with top-p over all tokens
MATRICES = 1.15                 # bytes that a layer keeps, in inputs and outputs of its matrices
IN_PYTHON = 1.32                # factor of that where an activation is several operations in Python
BACKWARD = 1.2                  # bytes of a layer in its backward pass, in bytes that it keeps
FORWARD = 3                     # the same without a gradient, in inputs and outputs of its widest matrix


@lru_cache(maxsize=8)
def model_shapes(config: ModelConfig, tp: int):
    """Return the model of a configuration on the meta device: shapes without values.

    tp      number of processes that divide the matrices of every layer; these are the shapes of one
    raises  ValueError in one line if there is no usable config.json
    """
    adapter = adapter_settings(config.model_path)
    path = adapter.get("base_model_name_or_path", config.model_path)
    trust, options = dict(trust_remote_code=config.trust_remote_code), attention_options(config)
    if path:
        check_model_path(config.model_path, config_only=True)
    try:
        with torch.device("meta"):
            settings = tiny_gemma(byte_tokenizer(), config).config
            settings = AutoConfig.from_pretrained(path, **trust) if path else settings
            divide(settings.get_text_config(), tp)
            model = auto_class(settings).from_config(settings, dtype=torch.float32, **trust, **options)
            freeze_towers(model)
            if rank := adapter.get("r", config.lora_rank):
                add_adapter(model, replace(config, lora_rank=rank), False)
            return with_precision(model.eval(), config.precision)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"--model_path={path}: no usable config.json: {first_line(error)}") from None


def divide(text_config, tp: int) -> None:
    """Give a process its share of the heads and columns, as parallelize_layers in engine/sharding.py does."""
    if tp > 1:
        heads = text_config.num_attention_heads
        text_config.head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
        for name in "num_attention_heads", "num_key_value_heads", "intermediate_size":
            setattr(text_config, name, getattr(text_config, name) // tp)


def step_tokens(config: Config, longest_prompt: int, shared_prompt: bool) -> int:
    """Return the tokens of a step, at most; demonstrations have the limit of completions."""
    size = config.grpo.num_completions_per_prompt if config.training.use_grpo else 1
    prompt_tokens = longest_prompt * (1 if shared_prompt else size)
    return config.training.batch_size * (prompt_tokens + size * config.grpo.generation_max_length)


def memory_gb(
    config: Config, longest_prompt: int, mesh: dict[str, int], shared_prompt: bool = True
) -> dict[str, float]:
    """Return the memory of a process by purpose, in 10^9 bytes, and in all: at the peak.

    longest_prompt  in tokens;  mesh  as parse_mesh returns it
    """
    training, grpo, limit = config.training, config.grpo, config.grpo.generation_max_length
    shards, slices = mesh["fsdp"], mesh["replicate"] * mesh["fsdp"]
    model = model_shapes(config.model, mesh["tp"])
    text_config, layers = model.config.get_text_config(), layers_of(text_model(model))
    types, width = getattr(text_config, "layer_types", None) or [], text_config.hidden_size
    if set(types) - {"full_attention", "sliding_attention"}:      # some carry state from token to token
        shared_prompt = False
    weights, trained = num_bytes(model.parameters()), num_bytes(trainable_parameters(model))
    value_head = 4 * (width**2 + 4 * width + 1) if training.use_grpo and grpo.use_value_head else 0
    layer_weights = [num_bytes(layer.parameters()) for layer in layers]
    # Weights outside the layers stay gathered in a pass. Of layers there are two, and the gradient of one.
    gathered = weights - sum(layer_weights) + 3 * max(layer_weights) if shards > 1 else 0
    tokens = math.ceil(step_tokens(config, longest_prompt, shared_prompt) / slices)
    tokens = min(tokens, max(training.max_tokens_per_forward, longest_prompt + limit))
    row_length = 0 if shared_prompt else longest_prompt + limit
    training_pass = pass_bytes(model, tokens, training.gradient_checkpointing, row_length)
    if not training.memory_gb and best_device(config.model.device).type == "cpu":
        fragments = FRAGMENTS_WITH_ADAPTER if has_adapter(model) else FRAGMENTS
        training_pass = fragments * training_pass + HEAP
    prompts = math.ceil(training.batch_size / slices)
    if grpo.generation_batch_size:
        prompts = min(prompts, max(1, grpo.generation_batch_size // grpo.num_completions_per_prompt))
    rows = prompts * grpo.num_completions_per_prompt
    # An evaluation samples one completion of each prompt, so more prompts at once.
    prompts = max(prompts, min(rows, math.ceil(config.data.eval_limit / slices)))
    sampling = engine_bytes(config) or sampling_bytes(
        model, prompts, rows, longest_prompt, limit, shared_prompt)
    sizes = {
        "weights": weights / shards + value_head,
        "AdamW": trained / shards * (0.51 if training.adam_8bit else 2) + 2 * value_head,
        "reference": reference_bytes(config, model) / shards,
        "gradients": trained / shards + value_head,
        "training pass": training_pass + gathered,
        "sampling": sampling + weights * (shards > 1),
    }
    always = sizes["weights"] + sizes["AdamW"] + sizes["reference"]
    sizes["in all"] = always + max(sizes["gradients"] + sizes["training pass"], sizes["sampling"])
    return {name: size / 1e9 for name, size in sizes.items()}


def engine_bytes(config: Config) -> float:
    """Return the bytes of a GPU that vLLM takes while it samples; 0 if it does not, or without a GPU."""
    if config.grpo.engine != "vllm":
        return 0
    device, memory = best_device(config.model.device), config.training.memory_gb
    memory = memory or available_gb(device) * (device.type == "cuda")
    return config.grpo.engine_memory * memory * 1e9


def reference_bytes(config: Config, model) -> int:
    """Return the bytes of the reference on the device between its passes, undivided."""
    if not config.training.use_grpo or not config.grpo.kl_coef or config.grpo.reference_offload:
        return 0
    if config.grpo.reference_path:
        model = model_shapes(config_of_reference(config), 1)
    if has_adapter(model):
        return num_bytes(trainable_parameters(model))
    exact = config.grpo.reference_mode == "ema" or precision_of(model) == "float32"
    small = [] if exact else [weight for _, _, weight in matrices_of_layers(model)]
    return num_bytes(model.parameters()) - 2 * sum(parameter.numel() for parameter in small)


def num_bytes(parameters: Iterable) -> int:
    """Return the bytes of all parameters."""
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


# ---- a training pass, and sampling -------------------------------------------------------------------------


def widths(model: PreTrainedModel, layer: torch.nn.Module) -> list[tuple[int, bool]]:
    """Return for each matrix of a layer how many numbers of a token go in and out, and if it is of experts.

    Of the active experts. Adapters are left out.
    """
    config = model.config.get_text_config()
    active = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None) or 1
    matrices = (p for name, p in layer.named_parameters() if p.ndim in (2, 3) and "lora_" not in name)
    return [(sum(p.shape[-2:]) * (active if p.ndim == 3 else 1), p.ndim == 3) for p in matrices]


@lru_cache(maxsize=16)
def bytes_of_layers(model: PreTrainedModel, row_length: int) -> list[float]:
    """Return the bytes that each layer of the text model keeps of a token for its backward pass.

        matrices    MATRICES * size * (inputs + outputs)    size is 4, or 2 in 16 bits
        norms       4 * (x, x / rms(x))                     with LoRA not x / rms(x)

    row_length  of plain rows, which keep a mask, or with eager attention scores; 0 in a packed pass
    """
    config, frozen = model.config.get_text_config(), has_adapter(model)
    size = 2 if precision_of(model) != "float32" else 4
    size_of_experts = size if frozen else 4               # those that are trained compute in float32
    scores = 2 * config.num_attention_heads if config._attn_implementation == "eager" else 1

    def kept(layer: torch.nn.Module) -> float:
        kinds = [type(module).__name__ for module in layer.modules()]
        of_matrices = (n * (size_of_experts if experts else size) for n, experts in widths(model, layer))
        kept = MATRICES * sum(of_matrices)
        kept += 4 * (1 if frozen else 2) * config.hidden_size * sum("norm" in kind.lower() for kind in kinds)
        in_python = "NewGELUActivation" in kinds or getattr(config, "swiglu_limit", None) is not None
        return kept * (IN_PYTHON if in_python else 1) + 4 * scores * row_length

    return [kept(layer) for layer in layers_of(text_model(model))]


def cast_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of the 16-bit copies that autocast keeps of the matrices that are trained."""
    matrices = [weight for _, _, weight in matrices_of_layers(model) if weight.ndim == 2]        # no experts
    return 2 * (precision_of(model) != "float32") * sum(w.numel() for w in matrices if w.requires_grad)


def pass_bytes(model: PreTrainedModel, tokens: int, recompute: bool, row_length: int = 0) -> float:
    """Return the peak of a training pass beyond weights and gradients.

    That is what all layers keep, and more in a layer's backward pass or a chunk of engine/chunked_head.py.

    recompute   --gradient_checkpointing: of all layers but one the input alone is kept
    row_length  tokens of a plain row, 0 in a packed pass
    """
    hidden, layers = 4 * model.config.get_text_config().hidden_size, bytes_of_layers(model, row_length)
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    parameters = (p for layer in layers_of(text_model(model)) for p in layer.parameters())
    gradient = 4 * max(parameter.numel() for parameter in parameters if parameter.requires_grad)
    head_gradient = 4 * head.numel() * head.requires_grad
    tied = head_gradient * (head is embedding)            # kept until there is that of the embedding as well
    in_head = 4 * LOGITS * min(tokens, chunk_size(head)) * len(head) + head_gradient
    in_layer = tokens * BACKWARD * max(layers) + gradient + tied
    # A layer has freed half of what it has kept when its backward pass takes most.
    kept = len(layers) * hidden if recompute else sum(layers) - max(layers) / 2
    peak = tokens * (6 * hidden + kept) + cast_bytes(model) + max(in_layer, in_head)
    return max(peak, head_gradient + tied)


def sampling_bytes(
    model: PreTrainedModel, prompts: int, rows: int, longest: int, limit: int, shared_prompt: bool = True
) -> float:
    """Return the peak of sampling beyond the weights: keys and values of all layers, and a prefill or a step.

    prompts  that are forwarded at once, of up to `longest` tokens each
    rows     completions that are sampled at once, all up to the limit
    """
    config, layers = model.config.get_text_config(), layers_of(text_model(model))
    types = getattr(config, "layer_types", None) or [None] * len(layers)
    own_keys = len(layers) - (getattr(config, "num_kv_shared_layers", None) or 0)          # Gemma 4
    size = 2 if precision_of(model) != "float32" and shared_prompt else 4
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    row_length = limit if shared_prompt else longest + limit                     # a plain row has the prompt
    cached = largest = 0
    for layer, layer_type in zip(layers[:own_keys], types, strict=False):
        window = config.sliding_window if layer_type == "sliding_attention" else longest + limit
        dims = filter(None, (getattr(module, "head_dim", None) for module in layer.modules()))
        token = 2 * size * heads * max(dims, default=config.hidden_size // config.num_attention_heads)
        of_rows = token * rows * (row_length if shared_prompt else min(row_length, window))
        cached += of_rows + token * prompts * min(longest, window)
        largest = max(largest, of_rows)                   # copied for more tokens
    widest = max(n for layer in layers for n, _ in widths(model, layer))
    prefill = prompts * longest * FORWARD * 4 * widest
    scores = 4 * 4 * config.num_attention_heads * rows * (longest + limit)
    logits = 4 * LOGITS * rows * len(model.get_output_embeddings().weight)
    return cast_bytes(model) + cached + max(prefill, largest + scores + logits)


# ---- settings that follow, and lines for the console ------------------------------------------------------


def resolve_memory_settings(
    config: Config, device: str, longest_prompt: int, mesh: dict[str, int], memory: float
) -> Config:
    """Return the configuration with max_tokens_per_forward and gradient_checkpointing, where not given.

    On an accelerator they are the longest passes that fit without recomputation, else with it; if none fits,
    those that need least. On a CPU or XLA they are constants.
    device  its type;  memory  of the device, in 10^9 bytes
    """
    training = config.training
    tokens, recompute = training.max_tokens_per_forward, training.gradient_checkpointing
    sizes = {"cpu": [2048], "xla": [8192]}.get(device, PASS_TOKENS)
    sizes = [tokens] if tokens else [max(size, 2 * longest_prompt) for size in sizes]
    choose = device not in ("cpu", "xla") and not recompute and "gradient_checkpointing" not in training.given
    settings = product([False, True] if choose else [recompute], dict.fromkeys(sizes))
    choices = [
        replace(config, training=replace(
            training, gradient_checkpointing=switch, max_tokens_per_forward=size))
        for switch, size in settings
    ]
    if len(choices) == 1:
        return choices[0]
    try:
        needed = [memory_gb(choice, longest_prompt, mesh)["in all"] for choice in choices]
    except Exception:                                     # not every architecture has an estimate
        return choices[0]
    fitting = [choice for choice, gb in zip(choices, needed, strict=True) if gb <= FULL * memory]
    return fitting[0] if fitting else choices[needed.index(min(needed))]


def describe_step(
    config: Config, *, longest_prompt: int, shared_prompt: bool, mesh: dict[str, int], memory: float,
    libraries: float = 0.0,
) -> list[str]:
    """Return lines for the console about a step.

    memory     of the device, in 10^9 bytes; 0: not estimated, because XLA plans its memory at compilation
    libraries  part of it that Python and its libraries take
    """
    training, prompts = config.training, config.training.batch_size
    size, limit = config.grpo.num_completions_per_prompt, config.grpo.generation_max_length
    tokens = step_tokens(config, longest_prompt, shared_prompt)
    num_passes = math.ceil(tokens / training.max_tokens_per_forward)
    lines = [
        f"a step: {prompts} prompts of up to {longest_prompt} tokens x {size} = {prompts * size} completions "
        f"of up to {limit}; {tokens} tokens at most, in {num_passes} pass{'es' * (num_passes > 1)}"
    ] if training.use_grpo else []
    if not memory:
        return lines
    try:
        sizes = memory_gb(config, longest_prompt, mesh, shared_prompt)
    except Exception as error:
        return [*lines, f"memory: no estimate for this model: {first_line(error)}"]
    total = sizes.pop("in all") + libraries
    sizes = {"libraries": libraries} | sizes
    table = ", ".join(f"{name} {size:.2g}" for name, size in sizes.items() if size >= 0.005)
    line = (
        f"memory: about {total:.3g} of {memory:.3g} GB at most ({table}; gradients and training pass "
        "alternate with sampling)"
    )
    if total > FULL * memory:
        line += f"; if it runs out: {less_memory(config)}"
    return [*lines, line]


def less_memory(config: Config) -> str:
    """Return flags with which a step of these settings takes less memory."""
    training, grpo = config.training, config.grpo
    flags = f"--max_tokens_per_forward {max(1, training.max_tokens_per_forward // 2)}"
    if not training.gradient_checkpointing:
        flags += " --gradient_checkpointing"
    if training.use_grpo:
        half = (grpo.generation_batch_size or config.rollout_size) // 2
        flags += f" --generation_batch_size {max(grpo.num_completions_per_prompt, half)}"
    return flags
