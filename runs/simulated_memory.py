"""
The peak memory of sampling and of a training pass, from a model's configuration alone.

The program's own functions run on fake tensors (torch), which have shapes and types but no values, and the
bytes of those alive are added up. So nothing here depends on the architecture, the precision or LoRA. Some
layers are run, with the peak a linear function of their number.
Left out on purpose: fragmentation, and kernels of other devices; those of the CPU are counted.
"""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from weakref import finalize

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig

from config import ModelConfig
from engine.adapters import add_adapter, trainable_parameters
from engine.cache import PlainCache, PrefixCache
from engine.errors import first_line
from engine.logits import compute_logits, restrict_logits
from engine.model_files import adapter_settings, attention_options, auto_class, check_model_path
from engine.recomputation import layers_of, recompute_activations
from engine.sampling_state import sample_inverse_cdf
from engine.text_model import freeze_towers, text_model
from logprobs import completion_log_probs
from model import byte_tokenizer, tiny_gemma
from engine.precision import with_precision
from sample import Rollout, sampling_mode

PROMPT, COMPLETION = 224, 16    # tokens of a group of two in a simulated pass; the head takes a fake second


class BytesAlive(TorchDispatchMode):
    """Count the bytes of the tensors that operations create within the context: now alive, and the peak."""

    def __init__(self, existing: list[Tensor]):
        super().__init__()
        self.now = self.peak = 0
        self.known = {tensor.untyped_storage()._cdata for tensor in existing}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._grouped_mm.default:            # of experts; its fake is for bfloat16
            left, right, ends = args[:3]
            experts = [] if right.ndim == 3 else [len(ends)]           # of the gradient of their weights
            result = left.new_empty(*experts, len(left), right.shape[-1])
        else:
            result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (key := tensor.untyped_storage()._cdata) not in self.known:
                storage = tensor.untyped_storage()
                self.known.add(key)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                finalize(storage, self.forget, key, storage.nbytes())
        return result

    def forget(self, key: int, size: int) -> None:
        """Subtract a storage that has been freed."""
        self.known.discard(key)
        self.now -= size

    def take_peak(self) -> int:
        """Return the peak since the last call."""
        peak, self.peak = self.peak, self.now
        return peak


class FakePolicy:
    """The policy of a ModelConfig as fake tensors. Raises ValueError in one line if config.json is missing.

    recompute  --gradient_checkpointing
    tp         number of processes that divide the matrices of every layer; these are the shapes of one
    """

    def __init__(self, config: ModelConfig, recompute: bool = False, tp: int = 1):
        adapter = adapter_settings(config.model_path)
        path = adapter.get("base_model_name_or_path", config.model_path)
        trust, options = dict(trust_remote_code=config.trust_remote_code), attention_options(config)
        if path:
            check_model_path(config.model_path, config_only=True)
        try:
            with torch.device("meta"):
                settings = tiny_gemma(byte_tokenizer()).config
                settings = AutoConfig.from_pretrained(path, **trust) if path else settings
                divide(settings.get_text_config(), tp)
                model = auto_class(settings).from_config(settings, dtype=torch.float32, **trust, **options)
                freeze_towers(model)
                if rank := adapter.get("r", config.lora_rank):
                    add_adapter(model, replace(config, lora_rank=rank), False)
                with_precision(model.eval(), config.precision)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"--model_path={path}: no usable config.json: {first_line(error)}") from None
        self.model, self.mode = model, FakeTensorMode(allow_non_fake_inputs=True)
        self.layers = layers_of(text_model(model))
        self.call(model.to_empty, device="cpu")
        model.tie_weights()
        if recompute:
            recompute_activations(model)
        model.base_model.forward = partial(self.forward, model.base_model.forward)

    def call(self, function: Callable, *args, **kwargs):
        """Call a function such that its new tensors are fake as well."""
        with self.mode:
            return function(*args, **kwargs)

    def forward(self, function: Callable, *args, **kwargs):
        """Call the model's forward. Masks of plain rows stay true tensors, as transformers reads them."""
        return self.call(function, *args, **kwargs) if "token_layout" in kwargs else function(*args, **kwargs)

    def pass_bytes(self, tokens: int, shared_prompt: bool, policy: dict) -> int:
        """Return the peak of a training pass beyond weights and gradients. policy: as GRPOConfig.policy."""
        prompts = -(-tokens // (PROMPT * (1 if shared_prompt else 2) + 2 * COMPLETION))
        ids = torch.ones(2 * prompts, COMPLETION, dtype=torch.long)
        prompt_ids = torch.ones(prompts, PROMPT, dtype=torch.long)
        rollout = Rollout(
            prompt_ids, prompt_ids > 0, ids, ids > 0, torch.zeros(ids.shape), ids[:, 0] > 0, [""] * len(ids))

        def simulate() -> list[int]:
            gradients = [self.call(torch.zeros_like, p) for p in trainable_parameters(self.model)]
            for parameter, gradient in zip(trainable_parameters(self.model), gradients, strict=True):
                parameter.grad = gradient
            embedding, peaks = self.model.get_input_embeddings(), []
            with BytesAlive([*self.tensors(), *gradients]) as alive:
                handle = embedding.register_forward_hook(partial(split_peak, alive, peaks))
                result = completion_log_probs(self.model, rollout, **policy, shared_prompt=shared_prompt)
                self.call(result.logp.sum().backward)
            handle.remove()
            # Fake gradients of a tied head and embedding are added out of place, true ones in place.
            tied = embedding.weight is self.model.get_output_embeddings().weight
            return [*peaks, alive.peak - 4 * embedding.weight.numel() * (tied and len(peaks))]

        return self.peak(simulate)

    def sampling_bytes(
        self, prompts: int, size: int, longest_prompt: int, limit: int, shared_prompt: bool, policy: dict
    ) -> int:
        """Return the peak of sampling beyond the weights.

        prompts  whose completions, `size` of each, are sampled at once, all up to the limit
        policy   as GRPOConfig.policy
        """
        longest = max(1, limit - 1)
        prompt_of = [prompt for prompt in range(prompts) for _ in range(size)]
        ones = torch.ones(len(prompt_of), dtype=torch.long)

        def draw(hidden: Tensor) -> None:
            logits = restrict_logits(compute_logits(self.model, hidden), **policy)
            sample_inverse_cdf(logits, torch.zeros(len(logits)))

        def simulate() -> list[int]:
            with BytesAlive(self.tensors()) as alive, sampling_mode(self.model, shared_prompt):
                cache = PrefixCache(self.model) if shared_prompt else PlainCache(self.model)
                hidden = cache.add_prompts([*range(prompts)], [[1] * longest_prompt] * prompts)
                peaks = [alive.take_peak()]
                draw(hidden.repeat_interleave(size, dim=0))
                cache.compact([*range(len(ones))], prompt_of, 0, longest)
                peaks.append(alive.take_peak())
                draw(cache.forward(ones, ones * longest, longest))
            return [*peaks, alive.peak]

        return self.peak(simulate, every_layer=not shared_prompt)         # PlainCache counts layers itself

    def peak(self, simulate: Callable[[], list[int]], every_layer: bool = False) -> int:
        """Return the highest peak with all layers. simulate: returns a peak for each part of its work.

        Runs one layer of each kind, then two of one kind: a layer of that kind adds the difference.
        """
        types = getattr(self.model.config.get_text_config(), "layer_types", None) or [None] * len(self.layers)
        kinds: dict[tuple, list[int]] = {}
        for index, layer in enumerate(self.layers):
            key = types[index], tuple(parameter.shape for parameter in layer.parameters())
            kinds.setdefault(key, []).append(index)
        one_each = [indices[0] for indices in kinds.values()]
        if every_layer or len(self.layers) <= len(kinds) * (len(kinds) + 2):
            return max(simulate())
        with self.some_layers(one_each):
            base = simulate()
        peaks = list(base)
        for indices in kinds.values():
            if len(indices) > 1:
                with self.some_layers(sorted([*one_each, indices[1]])):
                    added = [new - old for new, old in zip(simulate(), base, strict=True)]
                peaks = [peak + (len(indices) - 1) * more for peak, more in zip(peaks, added, strict=True)]
        return max(peaks)

    @contextmanager
    def some_layers(self, indices: list[int]):
        """Leave out the layers that are not at these indices within the context."""
        config = self.model.config.get_text_config()
        container = next(m for m in self.model.modules() if self.layers[0] in m._modules.values())
        modules, number, types = container._modules, len(self.layers), getattr(config, "layer_types", None)
        try:
            container._modules = {str(i): self.layers[index] for i, index in enumerate(indices)}
            config.num_hidden_layers, config.layer_types = len(indices), types and [types[i] for i in indices]
            yield
        finally:
            container._modules, config.num_hidden_layers, config.layer_types = modules, number, types

    def tensors(self) -> list[Tensor]:
        """Return weights and buffers."""
        return [*self.model.parameters(), *self.model.buffers()]


def split_peak(alive: BytesAlive, peaks: list[int], module, args, output: Tensor) -> None:
    """Begin a new peak when the gradient reaches the embedding, whose own comes when activations are gone."""
    if output.requires_grad:
        output.register_hook(lambda gradient: peaks.append(alive.take_peak()))


def divide(text_config, tp: int) -> None:
    """Give a process its share of the heads and columns, as parallelize_layers in engine/sharding.py does."""
    if tp > 1:
        heads = text_config.num_attention_heads
        text_config.head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
        for name in "num_attention_heads", "num_key_value_heads", "intermediate_size":
            setattr(text_config, name, getattr(text_config, name) // tp)
