"""
--engine vllm: its log-probabilities against the trainer's, masks and stop tokens, weights that are not sent, whole runs.

make test-vllm runs this in an environment of its own, with a vLLM for CPUs.
"""

import shutil
from functools import partial

import pytest
import torch

pytest.importorskip("vllm", reason="vllm is not installed: make test-vllm does that")

import train
from conftest import build, comparable, gemma4_text, run_process
from config import GRPOConfig, ModelConfig
from data import encode_prompt
from engine import make_engine, vllm_engine
from engine.adapters import add_adapter
from engine.models import load_any_policy
from engine.shared import Shared
from engine.text_model import trainable_parameters
from engine.vllm_engine import VLLM
from experience import Batch, add_trainer_logp
from policy import RatioError
from runs.command_line import parse_config
from runs.folder import read_jsonl

SIZES = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    vocab_size=267, pad_token_id=0, eos_token_id=1, bos_token_id=2, initializer_range=0.1, max_position_embeddings=512,
)
IN_TURN = dict(sliding_window=16, layer_types=["sliding_attention", "full_attention"])
ARCHITECTURES = {
    "gemma2": partial(                                    # vLLM has no head of its own for it
        build, "gemma2", SIZES, sliding_window=16, query_pre_attn_scalar=32, final_logit_softcapping=10.0,
        attn_logit_softcapping=5.0, attn_implementation="eager"),
    "gemma3": partial(build, "gemma3_text", SIZES, **IN_TURN, query_pre_attn_scalar=32),
    "qwen3": partial(build, "qwen3", SIZES, tie_word_embeddings=True),
    "gemma4": partial(
        build, "gemma4_text", gemma4_text() | SIZES | IN_TURN | dict(global_head_dim=64, vocab_size_per_layer_input=267)),
    "llama": partial(build, "llama", SIZES, tie_word_embeddings=False),
}
PROMPTS = ["47+85=?", "1+1=?", "What is the sum of three and four?"]
RUN = [
    "--use_grpo", "--engine", "vllm", "--cold_start_steps", "0", "--batch_size", "4", "--max_steps", "2", "--eval_limit", "4",
    "--generation_max_length", "16", "--report_to", "none", "--eval_steps", "0",
]


def policy_of(model, tokenizer, earlier=[]) -> Shared:    # noqa: B006
    """A policy whose vLLM takes the place of the one before, which would end groups of the new one when it is freed."""
    while earlier:
        earlier.pop().llm.llm_engine.engine_core.shutdown()
    policy = make_engine("shared", model, tokenizer)
    policy.sampler = VLLM(policy, max_length=256, memory=0.3, at_once=7)
    earlier.append(policy.sampler)
    return policy


@pytest.fixture(scope="module")
def tiny(tokenizer):
    torch.manual_seed(0)
    return policy_of(load_any_policy(ModelConfig())[0], tokenizer)


def update(model, steps: int) -> None:
    """Move the trained weights far enough that every tensor matters."""
    optimizer = torch.optim.AdamW(trainable_parameters(model), lr=3e-3)
    ids = torch.randint(3, 260, (8, 32), generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def sample(policy, **options):
    with policy.sampling():
        return policy.sample(PROMPTS, GRPOConfig(engine="vllm", **{"generation_max_length": 32} | options), seeds=3)


def deviation(policy, rollout) -> float:
    return add_trainer_logp(Batch.of_rollout(rollout, torch.ones(len(rollout.finished), 1)), policy)


@pytest.mark.parametrize("name,adapter", [*((name, False) for name in ARCHITECTURES), ("gemma3", True), ("llama", True)])
def test_engine_and_trainer_agree_before_and_after_ten_updates(name, adapter, tokenizer):
    torch.manual_seed(0)
    model = ARCHITECTURES[name]().eval()
    if adapter:
        add_adapter(model, ModelConfig(lora_rank=4), False)
    policy = policy_of(model, tokenizer)
    before = sample(policy)
    update(model, 10)
    after = sample(policy)
    assert deviation(policy, before) > policy.ratio_tolerance, "the updates must be large enough to be seen"
    assert deviation(policy, after) < 1e-5


def test_a_mixture_of_experts_is_refused_where_vllm_cannot_take_its_weights(tokenizer):
    """vLLM for CPUs packs experts when it loads them, and a second time goes wrong."""
    torch.manual_seed(0)
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, decoder_sparse_step=1)
    model = build("qwen3_moe", SIZES, **experts).eval()
    policy = policy_of(model, tokenizer)
    with pytest.raises(RatioError, match="first ratios must be 1"):
        policy.require_ratios_of_1(deviation(policy, sample(policy)))


def test_rollouts_are_as_documented(tiny, tokenizer):
    tiny.model.generation_config.eos_token_id = list(range(1, 80))    # several stop ids, so that most completions end
    try:
        rollout = sample(tiny, generation_temperature=1.0, generation_top_p=1.0, generation_top_k=0)
    finally:
        tiny.model.generation_config.eos_token_id = 1
    assert rollout.completion_ids.shape == rollout.completion_mask.shape == rollout.sampling_logp.shape == (12, rollout.completion_ids.shape[1])
    stops = set(range(1, 80))
    for ids, mask, finished, logp in zip(
        rollout.completion_ids.tolist(), rollout.completion_mask, rollout.finished.tolist(), rollout.sampling_logp, strict=True,
    ):
        length = int(mask.sum())
        assert mask[:length].all() and not mask[length:].any() and (logp[length:] == 0).all() and (logp[:length] < 0).all()
        assert finished == (ids[length - 1] in stops)     # the stop token is part of the completion
        assert not stops & set(ids[: length - 1]) and (finished or length == 32)
    assert rollout.finished.sum() > 0
    assert rollout.prompt_ids[0][rollout.prompt_mask[0]].tolist() == encode_prompt(tokenizer, PROMPTS[0])
    assert deviation(tiny, rollout) < 1e-5


def test_an_error_in_the_middle_of_sampling_leaves_no_requests(tiny, monkeypatch):
    engine, tokens = tiny.sampler.llm.llm_engine, []

    def step(real=engine.step):
        tokens.append(len(engine.engine_core.engine_core.scheduler.running))
        if len(tokens) == 3:
            raise KeyboardInterrupt
        return real()

    before = sample(tiny)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine, "step", step)
        sample(tiny)
    assert torch.equal(sample(tiny).completion_ids, before.completion_ids) and tokens == [0, 7, 7], "seven at once"


@pytest.mark.parametrize("left_out", ["model.layers.2.mlp.down_proj.weight", "lm_head.weight"])
def test_a_weight_that_is_not_sent_ends_the_run_before_its_first_evaluation(tmp_path, monkeypatch, left_out):
    """lm_head.weight is the tied head."""
    whole = vllm_engine.checkpoint_weights
    monkeypatch.setattr(vllm_engine, "checkpoint_weights", lambda *args, **options: (
        pair for pair in whole(*args, **options) if pair[0] != left_out))
    with pytest.raises(RatioError, match=r"^first ratios must be 1, but differ from 1 by .* probabilities; see docs/troubleshooting\.md\.$"):
        train.train(parse_config([*RUN, "--output_dir", str(tmp_path / "run")]))
    assert read_jsonl(tmp_path / "run/metrics.jsonl") == [], "the start-up check samples with vLLM"


def test_a_base_model_that_is_sampled_although_an_adapter_trains_ends_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(vllm_engine, "adapted_weights", lambda model: {})
    flags = ["--lora_rank", "4", "--cold_start_steps", "2", "--cold_start_learning_rate", "1e-2", "--output_dir", str(tmp_path / "run")]
    with pytest.raises(RatioError, match="first ratios must be 1, but differ from 1 by"):
        train.train(parse_config([*RUN, *flags]))
    printed = " ".join(capsys.readouterr().out.split())
    assert "saved to" in printed and "--resume" in printed
    assert [line["phase"] for line in read_jsonl(tmp_path / "run/metrics.jsonl")] == ["eval", "cold_start", "cold_start", "eval"]


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    """On a CPU, where vLLM computes the same in every batch, bit for bit."""
    flags = [*RUN, "--cold_start_steps", "1", "--max_steps", "4", "--save_steps", "2", "--eval_steps", "2"]
    flags += ["--learning_rate", "1e-3", "--keep_checkpoints", "9"]
    whole = run_process("train.py", *flags, "--output_dir", tmp_path / "whole")
    assert "Traceback" not in whole.stderr
    steps = [line for line in comparable(tmp_path / "whole") if line["phase"] == "grpo"]
    assert len(steps) == 4 and all(line["sampler_deviation"] < 1e-5 for line in steps)
    shutil.copytree(tmp_path / "whole", tmp_path / "half")
    shutil.rmtree(tmp_path / "half/final")
    for checkpoint in sorted((tmp_path / "half/checkpoints").iterdir())[2:]:             # after the cold start, step 3
        shutil.rmtree(checkpoint)
    half = run_process("train.py", "--output_dir", tmp_path / "half", "--resume")
    assert "step-00000003" in half.stdout
    assert comparable(tmp_path / "half") == comparable(tmp_path / "whole")
    weights = [(tmp_path / run / "final/model.safetensors").read_bytes() for run in ("whole", "half")]
    assert weights[0] == weights[1]


def test_two_processes_have_an_engine_each(tmp_path):
    run_process("train.py", *RUN, "--output_dir", tmp_path / "run", processes=2)
    steps = [line for line in comparable(tmp_path / "run") if line["phase"] == "grpo"]
    assert len(steps) == 2 and all(line["sampler_deviation"] < 1e-5 for line in steps)
