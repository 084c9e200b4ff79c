"""Tokens and memory of a step are estimated before the weights are loaded, and settings follow the estimate."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from weakref import finalize

import pytest
import torch
from conftest import CURRENT_ARCHITECTURES, start_run
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, GPT2Config, GptOssConfig, LlamaConfig, Phi3Config, Qwen3Config, Qwen3MoeConfig,
)

import train
from config import Config, ModelConfig
from engine import make_engine
from engine.adapters import add_adapter, trainable_parameters
from engine.cache import PrefixCache
from engine.precision import with_precision
from engine.prefix_attention import use_prefix_attention
from engine.recomputation import recompute_activations
from engine.sampler import sample_in_blocks as sample_inverse_cdf
from logprobs import compute_logits, restrict_logits
from runs import fitting_flags, memory_estimate
from runs.fitting_flags import candidates
from runs.memory_estimate import (
    describe_step, memory_gb, model_shapes, pass_bytes, resolve_memory_settings, sampling_bytes, step_tokens,
)
from sample import Rollout, sampling_mode

ALONE = {"replicate": 1, "fsdp": 1, "tp": 1}


@pytest.fixture
def configured(tmp_path):
    """A folder with nothing but the config.json of a model with untied head and five equal layers."""
    sizes = dict(hidden_size=64, intermediate_size=192, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    Qwen3Config(**sizes, vocab_size=1000, tie_word_embeddings=False).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def describe(config, memory=100.0, longest_prompt=20):
    return describe_step(config, longest_prompt=longest_prompt, shared_prompt=True, mesh=ALONE, memory=memory)


def test_tokens_and_passes_are_those_of_a_step_in_which_all_goes_to_the_limit():
    config = Config.of(use_grpo=True, batch_size=4, max_tokens_per_forward=100, generation_max_length=30)
    line = describe(config)[0]
    assert "4 prompts of up to 20 tokens x 4 = 16 completions of up to 30" in line
    assert f"{4 * (20 + 4 * 30)} tokens at most, in 6 passes" in line
    assert step_tokens(config, 20, shared_prompt=False) == 16 * (20 + 30)
    assert step_tokens(Config.of(batch_size=4, generation_max_length=30), 20, shared_prompt=True) == 4 * (20 + 30)


def test_what_does_not_fit_is_said_with_what_to_turn():
    config = Config.of(use_grpo=True, max_tokens_per_forward=2048)
    assert "runs out" not in describe(config)[1]
    assert "--gradient_checkpointing" in describe(config, memory=0.1)[1]


@pytest.mark.parametrize("error", [RuntimeError("no fake kernel\nand more"), AttributeError("no head_dim"), AssertionError()])
def test_an_estimate_that_fails_ends_no_run(monkeypatch, error):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(memory_estimate, "memory_gb", fail)
    config = Config.of(use_grpo=True, max_tokens_per_forward=2048)
    assert describe(config)[1] == f"memory: no estimate for this model: {(str(error) or 'AssertionError').splitlines()[0]}"
    chosen = resolve_memory_settings(Config.of(use_grpo=True), "cuda", 20, ALONE, 24.0).training
    assert (chosen.max_tokens_per_forward, chosen.gradient_checkpointing) == (8192, False)


class BytesAlive(TorchDispatchMode):
    """The peak of the bytes of tensors that operations create within the context."""

    def __init__(self, existing):
        super().__init__()
        self.now = self.peak = 0
        self.known = {tensor.untyped_storage()._cdata for tensor in existing}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (key := tensor.untyped_storage()._cdata) not in self.known:
                storage = tensor.untyped_storage()
                self.known.add(key)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                finalize(storage, self.forget, key, storage.nbytes())
        return result

    def forget(self, key, size):
        self.known.discard(key)
        self.now -= size


SIZES = dict(
    hidden_size=192, intermediate_size=576, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=2, head_dim=32, vocab_size=1000)
WITH_WINDOWS = SIZES | dict(sliding_window=64)
EXPERTS = SIZES | dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128)
WIDE = SIZES | dict(hidden_size=512, intermediate_size=1536)
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True), "qwen3": Qwen3Config(**SIZES),
    "gemma3": Gemma3TextConfig(**WITH_WINDOWS, query_pre_attn_scalar=32), "gemma2": Gemma2Config(**WITH_WINDOWS),
    "qwen3_moe": Qwen3MoeConfig(**EXPERTS), "gpt_oss": GptOssConfig(**WITH_WINDOWS, num_local_experts=8, num_experts_per_tok=2),
    "gpt2": GPT2Config(n_embd=192, n_layer=6, n_head=8, vocab_size=1000), "wide": LlamaConfig(**WIDE),
    "phi3": Phi3Config(**{name: size for name, size in SIZES.items() if name != "head_dim"}, pad_token_id=0),
    "many_words": LlamaConfig(**SIZES | dict(num_hidden_layers=2, vocab_size=60000), tie_word_embeddings=True),
}
MOST_LOGITS = dict(temperature=0.8, top_k=0, top_p=0.9)   # all tokens are sorted


def shapes_and_model(name, tmp_path, precision="float32", lora_rank=0):
    CONFIGS[name].save_pretrained(tmp_path)
    config = ModelConfig(model_path=str(tmp_path), precision=precision, lora_rank=lora_rank)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).eval()
    if lora_rank:
        add_adapter(model, config, False)
    return model_shapes(config, 1), with_precision(model, precision)


@pytest.mark.parametrize("name,precision,lora_rank,recompute,shared", [
    ("llama", "float32", 0, False, True), ("qwen3", "float32", 8, False, True), ("qwen3", "bfloat16", 0, False, True),
    ("gemma3", "bfloat16", 8, False, True), ("gemma3", "float32", 0, True, True), ("gemma2", "float32", 0, False, True),
    ("qwen3_moe", "float32", 0, False, True), ("qwen3_moe", "bfloat16", 8, False, True), ("gpt_oss", "float32", 0, False, True),
    ("gpt2", "float32", 0, False, True), ("phi3", "bfloat16", 0, False, True), ("qwen3", "float32", 0, False, False),
    ("gpt_oss", "float32", 0, False, False), ("wide", "bfloat16", 0, True, True), ("many_words", "float32", 0, True, True),
])
def test_a_pass_takes_what_the_formula_says_or_up_to_a_third_less(name, precision, lora_rank, recompute, shared, tmp_path):
    torch.manual_seed(0)
    shapes, model = shapes_and_model(name, tmp_path, precision, lora_rank)
    if recompute:
        recompute_activations(model)
    prompts, group, longest, limit = (1, 2, 16, 24) if name == "wide" else (2, 4, 160, 120)
    ids, prompt_ids = torch.randint(5, 999, (prompts * group, limit)), torch.randint(5, 999, (prompts, longest))
    mask = ids > 0
    mask[::2, -2:] = False                                # ragged: plain rows are padded
    rollout = Rollout(prompt_ids, prompt_ids > 0, ids, mask, torch.zeros(ids.shape), ids[:, 0] > 0, [""] * len(ids))
    parameters = trainable_parameters(model)
    for parameter in parameters:                          # as in the second pass of a step
        parameter.grad = torch.zeros_like(parameter)
    with BytesAlive([*model.parameters(), *model.buffers(), *(p.grad for p in parameters)]) as alive:
        engine = make_engine("shared" if shared else "plain", model, None)
        engine.log_probs(rollout, None, MOST_LOGITS).logp.sum().backward()
    tokens = prompts * (longest + group * limit) if shared else prompts * group * (longest + limit)
    estimate = pass_bytes(shapes, tokens, recompute, 0 if shared else longest + limit)
    assert 1 <= estimate / alive.peak <= 1.35, f"{estimate=} {alive.peak=}"


@pytest.mark.parametrize("name,precision,lora_rank", [("qwen3", "float32", 8), ("gemma3", "bfloat16", 0), ("many_words", "float32", 0)])
def test_sampling_takes_what_the_formula_says_or_up_to_a_third_less(name, precision, lora_rank, tmp_path):
    torch.manual_seed(0)
    shapes, model = shapes_and_model(name, tmp_path, precision, lora_rank)
    prompts, group, longest, limit = 2, 4, 160, 120
    rows = torch.arange(prompts * group)

    def draw(hidden):
        logits = restrict_logits(compute_logits(model, hidden), **MOST_LOGITS)
        sample_inverse_cdf(logits, torch.zeros(len(logits)))

    with BytesAlive([*model.parameters(), *model.buffers()]) as alive, sampling_mode(model), use_prefix_attention(model):
        cache = PrefixCache(model)
        hidden = cache.add_prompts([*range(prompts)], torch.randint(5, 999, (prompts, longest)).tolist())
        draw(hidden.repeat_interleave(group, dim=0))
        for capacity in 32, limit - 1:
            cache.compact(rows.tolist(), (rows // group).tolist(), len(rows), capacity)
            draw(cache.forward(rows, torch.full_like(rows, capacity), capacity))
    estimate = sampling_bytes(shapes, prompts, prompts * group, longest, limit)
    assert 1 <= estimate / alive.peak <= 1.35, f"{estimate=} {alive.peak=}"


def test_an_evaluation_samples_more_prompts_at_once(configured):
    config = Config.of(use_grpo=True, model_path=configured, max_tokens_per_forward=512)
    without = replace(config, data=replace(config.data, eval_limit=0))
    assert memory_gb(config, 500, ALONE)["sampling"] > 1.5 * memory_gb(without, 500, ALONE)["sampling"]


@pytest.mark.parametrize("flags", ["", "--lora_rank 4", "--use_value_head true"])
def test_weights_gradients_adamw_and_reference_are_those_of_a_run(tmp_path, flags):
    run = start_run(tmp_path, "--use_grpo", "--use_kl_penalty", "true", "--cold_start_steps", "0", *flags.split())
    run.begin_phase(run.phases[0])
    trained = [parameter for group in run.optimizer.param_groups for parameter in group["params"]]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    run.optimizer.step()
    heads = list(run.value_head.parameters()) if run.value_head else []

    def gigabytes(tensors):
        return sum(tensor.nbytes for tensor in tensors) / 1e9

    found = memory_gb(run.config, 20, ALONE)
    states = [value for state in run.optimizer.state.values() for value in state.values() if value.ndim]
    assert found["weights"] == pytest.approx(gigabytes([*run.model.parameters(), *heads]))
    assert found["gradients"] == pytest.approx(gigabytes(parameter.grad for parameter in trained))
    assert found["AdamW"] == pytest.approx(gigabytes(states))
    assert found["reference"] == pytest.approx(gigabytes(run.reference.parameters()))
    supervised = replace(run.config, training=replace(run.config.training, use_grpo=False))
    assert memory_gb(supervised, 20, ALONE)["reference"] == 0
    offloaded = replace(run.config, grpo=replace(run.config.grpo, reference_offload=True))
    assert memory_gb(offloaded, 20, ALONE)["reference"] == 0
    eight = replace(run.config, training=replace(run.config.training, adam_8bit=True))
    in_two = 2 * len(heads and [1]) * gigabytes(heads)
    # torchao: a byte for each of two states, and a float32 scale for each 256 of them.
    expected = sum(p.numel() for p in trainable_parameters(run.model)) * 2 * (1 + 4 / 256) / 1e9 + in_two
    assert memory_gb(eight, 20, ALONE)["AdamW"] == pytest.approx(expected, rel=0.01)


def test_frozen_matrices_take_two_bytes_in_16_bits(configured):
    matrices = 5 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 192)
    full = memory_gb(Config.of(use_grpo=True, model_path=configured, max_tokens_per_forward=512), 20, ALONE)["weights"]
    for flags, key, saved in (
        (dict(lora_rank=4), "weights", 2 * matrices), (dict(), "reference", 2 * matrices), (dict(), "weights", 0),
        (dict(reference_mode="ema"), "reference", 0), (dict(reference_mode="periodic"), "reference", 2 * matrices),
    ):
        config = Config.of(
            use_grpo=True, model_path=configured, max_tokens_per_forward=512, precision="bfloat16", use_kl_penalty=True, **flags)
        found = memory_gb(config, 20, ALONE)
        adapter = found["gradients"] if flags.get("lora_rank") else 0
        assert found[key] - adapter == pytest.approx(full - saved / 1e9), (flags, key)


def test_processes_divide_weights_and_prompts(configured):
    config = Config.of(use_grpo=True, model_path=configured, max_tokens_per_forward=4096, batch_size=8)
    one, four, copies = (
        memory_gb(config, 20, ALONE | mesh) for mesh in ({}, {"fsdp": 4}, {"fsdp": 2, "replicate": 2}))
    for name in "weights", "AdamW", "gradients", "reference":
        assert one[name] == pytest.approx(4 * four[name]) == pytest.approx(2 * copies[name])
    # Activations are those of a quarter of the tokens, and weights are gathered.
    model = model_shapes(config.model, 1)
    layers = [sum(p.nbytes for p in layer.parameters()) for layer in model.model.layers]
    gathered = sum(p.nbytes for p in model.parameters()) - sum(layers) + 3 * layers[0]
    alone = pass_bytes(model, step_tokens(config, 20, True) // 4, False)
    expected = memory_estimate.FRAGMENTS * alone + memory_estimate.HEAP + gathered
    assert four["training pass"] == pytest.approx(expected / 1e9)
    assert copies["training pass"] == four["training pass"] and four["sampling"] > one["weights"]
    divided = memory_gb(config, 20, ALONE | {"tp": 2})
    matrices = 4 * 5 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 192) / 1e9
    assert divided["weights"] == pytest.approx(one["weights"] - matrices / 2)
    assert divided["training pass"] < one["training pass"]


@pytest.mark.parametrize("architecture,plain", [("qwen3_moe", False), ("gemma4_shared_keys", False), ("lfm2", True)])
def test_experts_shared_keys_and_layers_with_state_have_an_estimate(architecture, plain, tmp_path):
    CURRENT_ARCHITECTURES[architecture]().save_pretrained(tmp_path)
    config = Config.of(use_grpo=True, model_path=str(tmp_path), max_tokens_per_forward=256)
    state = torch.get_rng_state()
    shared, rows = (memory_gb(config, 20, ALONE, shared_prompt) for shared_prompt in (True, False))
    assert torch.equal(state, torch.get_rng_state()), "training is the same with and without an estimate"
    assert (shared == rows) is plain and 0 < shared["in all"] < 1


@pytest.mark.parametrize("memory,given,expected", [
    (110, {}, (8192, False)), (60, {}, (4096, False)), (35, {}, (2048, False)), (20, {}, (8192, True)), (1, {}, (2048, True)),
    (20, {"gradient_checkpointing": False}, (2048, False)), (100, {"gradient_checkpointing": True}, (8192, True)),
    (20, {"max_tokens_per_forward": 3000}, (3000, True)), (100, {"max_tokens_per_forward": 3000}, (3000, False)),
])
def test_the_longest_passes_that_fit_are_taken_and_recomputation_last(memory, given, expected, monkeypatch):
    def estimate(config, *rest):
        return {"in all": 9 + config.training.max_tokens_per_forward / (1000 if config.training.gradient_checkpointing else 100)}

    monkeypatch.setattr(memory_estimate, "memory_gb", estimate)
    chosen = resolve_memory_settings(Config.of(**given), "cuda", 100, ALONE, memory).training
    assert (chosen.max_tokens_per_forward, chosen.gradient_checkpointing) == expected
    if not given:
        longer = resolve_memory_settings(Config.of(), "cuda", 5000, ALONE, memory).training
        assert longer.max_tokens_per_forward == 10000, "a pass holds two of the longest prompt"


def test_on_a_cpu_nothing_is_switched_on(configured):
    config = resolve_memory_settings(Config.of(model_path=configured), "cpu", 20, ALONE, 0.001)
    assert (config.training.max_tokens_per_forward, config.training.gradient_checkpointing) == (2048, False)
    assert resolve_memory_settings(Config.of(model_path=configured), "xla", 20, ALONE, 0).training.max_tokens_per_forward == 8192


def test_estimate_needs_a_configuration_alone_and_names_flags_that_fit(configured, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.rglob("*"))
    train.main(["--use_grpo", "--estimate", "--model_path", configured, "--memory_gb", "24"])
    said = capsys.readouterr().out
    assert "not confirmed on a GPU" in said and "of 24 GB" in said
    assert "fits: --max_tokens_per_forward 8192 --gradient_checkpointing false" in said
    train.main(["--use_grpo", "--estimate", "--model_path", configured, "--memory_gb", "0.02", "--use_kl_penalty", "false"])
    said = capsys.readouterr().out
    assert "does not fit, tried: --max_tokens_per_forward" in said
    found = re.search(r"would fit, about ([\d.]+) GB: (.*)", said)
    lines = [line for line in said.splitlines() if "would fit" in line]
    assert float(found[1]) <= 0.018 and len(set(lines)) == len(lines) and "--precision" not in said      # auto chooses it
    flags = [*found[2].split(), "--use_kl_penalty", "false"]
    train.main(["--use_grpo", "--estimate", "--model_path", configured, "--memory_gb", "0.02", *flags])
    assert "\nfits: " in capsys.readouterr().out
    assert set(tmp_path.rglob("*")) == before


def test_with_vllm_sampling_takes_its_share_of_the_gpu(configured, capsys):
    flags = ["--use_grpo", "--estimate", "--model_path", configured, "--memory_gb", "24", "--engine", "vllm"]
    for memory, shown in ("0.3", "sampling 7.2;"), ("0.5", "sampling 12;"):
        train.main([*flags, "--engine_memory", memory])
        assert shown in capsys.readouterr().out


def test_flags_that_fit_are_not_named_again_with_more_beside_them(configured, monkeypatch, capsys):
    monkeypatch.setattr(fitting_flags, "memory_gb", lambda config, *_: {"in all": 1.0 if config.model.lora_rank else 99.0})
    train.main(["--use_grpo", "--estimate", "--model_path", configured, "--memory_gb", "24"])
    (line,) = re.findall("would fit.*", capsys.readouterr().out)
    assert "--lora_rank 16" in line and "--generation_batch_size" not in line


def test_estimate_for_processes_that_are_elsewhere(configured, capsys):
    train.main(["--use_grpo", "--estimate", "--model_path", configured, "--memory_gb", "24", "--mesh", "fsdp=4,tp=2"])
    assert "processes: fsdp=4 tp=2" in capsys.readouterr().out


@pytest.mark.parametrize("flags,error", [
    ("--model_path .", ". has no config.json"), ("--model_path nowhere/at/all", "no such folder"),
    ("--mesh fsdp=0", "--mesh=fsdp=0: write some of"), ("--memory_gb -1", "--memory_gb=-1.0: must be at least 0"),
    ("--mesh fsdp=2 --adam_8bit", "--adam_8bit: not in several processes"),
])
def test_mistakes_of_an_estimate_are_one_line(flags, error, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((SystemExit, ValueError)) as stop:
        train.main(["--use_grpo", "--estimate", *flags.split()])
    said = capsys.readouterr().err or str(stop.value)
    assert error in said and len(said.strip().splitlines()) == 1


def test_candidates_leave_out_what_was_given(configured):
    config = Config.of(use_grpo=True, model_path=configured, precision="float32", mesh="fsdp=2")
    assert all("precision" not in flags and "mesh" not in flags for flags in candidates(config, "bfloat16", "cuda"))
    changed = Config.of(**config.given_flags | {"lora_rank": 8})
    assert changed.model.lora_rank == 8 and changed.training.given == {"use_grpo", "mesh"}


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("flags", [
    "--batch_size 64 --max_tokens_per_forward 16384",
    "--batch_size 16 --max_tokens_per_forward 8192 --generation_max_length 400",
    "--batch_size 16 --max_tokens_per_forward 8192 --generation_max_length 400 --gradient_checkpointing",
])
def test_the_estimate_is_near_the_measured_peak(tmp_path, flags):
    """In a process of its own, on untrained weights, where hardly a completion ends before the limit."""
    (tmp_path / "varied.py").write_text("def varied(completions, **columns):\n    return list(range(len(completions)))\n")
    command = [sys.executable, "train.py", "--use_grpo", "--cold_start_steps", "0", "--max_steps", "1", "--eval_limit", "0",
               "--report_to", "none", "--reward_functions", f"{tmp_path}/varied.py:varied", "--output_dir", f"{tmp_path}/run"]
    said = subprocess.run([*command, *flags.split()], capture_output=True, text=True, check=True).stdout
    estimate = float(re.search(r"memory: about ([\d.]+) of", said)[1])
    peak = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])["peak_memory_gb"]
    assert 1 < estimate / peak < 1.7, f"{estimate=} {peak=}"       # of about a gigabyte
