"""
vLLM as the sampler of a run (--engine vllm). It runs in the process of the trainer, on the same device. The
policy itself computes the training passes.

The input is token ids; the output is token ids and the log-probabilities with which they were drawn. vLLM
starts with random weights, and receives the policy's weights before it samples. If a weight were missing, the
first ratios of a step would differ from 1 and end the run (Policy.require_ratios_of_1).

Written for vLLM 0.32, and tested on a CPU in float32 with dense models (docs/scale.md). Sleep mode, which
frees a GPU's memory while the policy is updated, is not tested, because it needs a GPU.
Not supported: engines in other processes.
"""

import copy
import importlib.util
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from engine.adapters import adapted_weights
from data import encode_prompt
from engine.devices import num_processes, on_all_ranks
from engine.device_policy import DevicePolicy
from engine.sampler import SamplingState
from engine.sharding import gathered, reshard
from logprobs import distribution_of
from sample import Rollout, make_rollout, random_generators, stop_token_ids

ENVIRONMENT_VARIABLES = {       # of vLLM, unless they are set already
    "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def refuse_engine(device: torch.device) -> None:
    """Raise ValueError if this installation or device cannot run --engine vllm."""
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(
            "--engine=vllm: vllm is not installed; it needs a separate environment: requirements-vllm.txt")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--engine=vllm: not supported on {device.type}; use --engine auto")


class VLLM:
    """A sampler for a policy: a vLLM engine with its weights. A process can have only one."""

    def __init__(
        self, policy: DevicePolicy, *, max_length: int = 2048, memory: float = 0.3, at_once: int = 0
    ):
        """Start vLLM for the architecture of a policy, on its device. Call on all ranks.

        max_length  tokens of the longest prompt and completion together
        memory      share of the GPU's memory; on a CPU keys and values get VLLM_CPU_KVCACHE_SPACE GB
        at_once     completions sampled at once; 0: vLLM's default
        """
        self.policy, model = policy, policy.model
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"                       # in this process
        matmul = torch.get_float32_matmul_precision()     # a worker sets it for the whole process
        for name, value in (ENVIRONMENT_VARIABLES | {"VLLM_FLOAT32_MATMUL_PRECISION": matmul}).items():
            os.environ.setdefault(name, value)
        self.sleeps = policy.device.type == "cuda"          # it shares the GPU
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__.removeprefix("FSDP")]      # FSDP2 adds it
        from vllm import LLM  # it reads the environment

        with tempfile.TemporaryDirectory() as folder:     # only the architecture, no weights
            config.save_pretrained(folder)
            self.llm = LLM(
                folder, load_format="dummy", skip_tokenizer_init=True, dtype=policy.precision,
                max_model_len=max_length, gpu_memory_utilization=memory, logprobs_mode="processed_logprobs",
                max_num_seqs=at_once or None,
                enable_sleep_mode=self.sleeps, enforce_eager=not self.sleeps, language_model_only=True,
                distributed_executor_backend="external_launcher" if num_processes() > 1 else None)

    @contextmanager
    def sampling(self):
        """Send the policy's weights to vLLM, which can sample within the context. Call on all ranks.

        After an error, too, vLLM frees the GPU's memory and forgets its requests.
        """
        model = self.policy.model
        reshard(model)
        try:
            if self.sleeps:
                on_all_ranks(partial(self.llm.wake_up, tags=["weights"]))
            heads = on_all_ranks(lambda: self.llm.apply_model(lambda engine: hasattr(engine, "lm_head")))
            weights = checkpoint_weights(model, with_tied_head=all(heads))
            on_all_ranks(lambda: self.llm.collective_rpc(
                "reload_weights", kwargs={"weights_iterator": weights}))
            if self.sleeps:
                on_all_ranks(partial(self.llm.wake_up, tags=["kv_cache"]))
            on_all_ranks(self.llm.reset_prefix_cache)
            yield
        finally:
            engine = self.llm.llm_engine                  # requests are left after an error in generate
            requests = [*engine.output_processor.request_states]
            on_all_ranks(partial(engine.abort_request, requests, internal=True))
            if self.sleeps:
                on_all_ranks(partial(self.llm.sleep, level=2))       # the next weights replace these

    def sample(self, prompts: list, config, seeds, *, num_completions: int, reply=None) -> Rollout:
        """As Policy.sample. All completions sample one turn, then the next."""
        from vllm import SamplingParams

        size, limit, tokenizer = num_completions, config.generation_max_length, self.policy.tokenizer
        prompt_ids = [encode_prompt(tokenizer, prompt) for prompt in prompts]
        seeds = [int(g.integers(2**62)) for g in random_generators(seeds, len(prompts), size)]
        stop_ids, distribution = stop_token_ids(self.policy.model, tokenizer), distribution_of(config)
        state = SamplingState(
            torch.zeros(len(seeds), limit), stop_ids, tokenizer.pad_token_id, distribution,
            torch.device("cpu"), reply)
        requests = [range(p * size, (p + 1) * size) for p in range(len(prompts))]     # rows of siblings
        while requests:
            inputs, parameters, count = [], [], state.count.tolist()
            for first, *others in requests:
                ids = prompt_ids[first // size] + state.ids[first, : count[first]].tolist()
                inputs.append({"prompt_token_ids": ids})
                parameters.append(SamplingParams(         # siblings have successive seeds
                    n=1 + len(others), seed=seeds[first] + count[first], max_tokens=limit - count[first],
                    stop_token_ids=stop_ids, ignore_eos=True, logprobs=0, detokenize=False, **distribution,
                ))
            outputs = self.llm.generate(inputs, parameters, use_tqdm=False)
            rows = [row for request in requests for row in request]
            turns = [turn for output in outputs for turn in output.outputs]
            for row, turn in zip(rows, turns, strict=True):
                at_each = zip(turn.token_ids, turn.logprobs, strict=True)        # of vLLM: {token: its logp}
                logp = [table[token].logprob for token, table in at_each]
                state.append(row, list(turn.token_ids), logp, turn.finish_reason == "stop")
            active = state.active_rows(rows)              # environments reply
            for row in active:
                forced = state.forced_tokens[row, state.count[row] :]
                added = forced[forced >= 0].tolist()
                state.append(row, added, [0.0] * len(added), False)
            requests = [[row] for row in active if state.count[row] < limit]     # a reply may fill it
        return make_rollout(tokenizer, prompt_ids, distribution, *state.results())


@torch.no_grad()
def checkpoint_weights(model, *, with_tied_head: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of all weights as in a checkpoint, with an adapter merged. Call on all ranks.

    One layer at a time is gathered.

    with_tied_head  also yield a head that is tied to the embedding, which most models of vLLM need
    """
    layers, tied = adapted_weights(model), model.config.get_text_config().tie_word_embeddings
    tensors = {name.replace(".base_layer", ""): tensor for name, tensor in model.state_dict().items()
               if ".lora_" not in name and (with_tied_head or not tied or "lm_head" not in name)}
    for _, names in groupby(tensors, lambda name: re.match(r".*?\.\d+\.|.*", name)[0]):        # of a layer
        weights = {}
        for name in names:
            weights[name] = gathered(tensors[name])
            if name in layers:
                weights[name] = weights[name].float() + gathered(layers[name].get_delta_weight("default"))
        yield from revert_weight_conversion(model, weights).items()
