"""Small models of many architectures, with random weights large enough that every logit matters; runs and what they leave."""

import os
import platform
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import train
from config import Config, GRPOConfig, ModelConfig
from data import Batches
from engine import make_engine
from engine.models import load_any_policy, save_any_policy
from engine.text_model import trainable_parameters
from experience import Groups, compute_experience
from model import byte_tokenizer
from runs.command_line import parse_config
from runs.folder import read_jsonl
from runs.phases import prepare_policy
from runs.run import Run
from runs.setup import set_up
from sample import Rollout, left_pad

ROOT = Path(__file__).parents[1]

for number, handler in (signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL):
    if signal.getsignal(number) == signal.SIG_IGN:        # as in a background job or under nohup: runs would inherit it
        signal.signal(number, handler)


def pytest_terminal_summary(terminalreporter):
    """End with the versions that the tests ran on, before the line of results."""
    names = "torch", "transformers", "peft", "datasets", "numpy"
    terminalreporter.write_line(", ".join([f"python {platform.python_version()}", *(f"{name} {version(name)}" for name in names)]))


SIZES = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    vocab_size=263, pad_token_id=0, eos_token_id=1, bos_token_id=2, initializer_range=0.3,
)
NO_HEAD_DIM = {name: value for name, value in SIZES.items() if name != "head_dim"}
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=16)
IN_TURN = dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"])
LINEAR_ATTENTION = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    layer_types=["linear_attention", "full_attention"])


def build(model_type, sizes=SIZES, **options):
    """A model of transformers; with towers for images or sound if its configuration has a text_config."""
    kind = AutoModelForImageTextToText if "text_config" in options else AutoModelForCausalLM
    return kind.from_config(AutoConfig.for_model(model_type, **sizes, **options))


def gemma4_text(**options):
    """Heads of another size in full attention, per-layer embeddings; windows shorter than the prompts."""
    rope = {name: {"rope_type": "default", "rope_theta": 1e4} for name in ("sliding_attention", "full_attention")}
    return dict(
        num_hidden_layers=4, sliding_window=5, layer_types=["sliding_attention", "full_attention"] * 2, global_head_dim=16,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=263, rope_parameters=rope, **{"num_kv_shared_layers": 0, **options})


def gemma4(**options):
    return build("gemma4_text", SIZES | gemma4_text(**options))


ARCHITECTURES = {
    # Windows shorter than the prompts; Gemma 2 with soft caps on attention scores and logits, which only eager attention has.
    "gemma2": partial(
        build, "gemma2", sliding_window=5, query_pre_attn_scalar=8, final_logit_softcapping=10.0, attn_logit_softcapping=5.0),
    "gemma3": partial(build, "gemma3_text", **IN_TURN, query_pre_attn_scalar=8),
    "qwen3": partial(build, "qwen3"),
    "llama": partial(build, "llama"),
    "mistral": partial(build, "mistral", sliding_window=5),
    "gpt2": partial(                                      # one id for both, dropout 0.1
        build, "gpt2", {}, n_embd=32, n_layer=2, n_head=4, n_positions=256, vocab_size=263, initializer_range=0.3,
        bos_token_id=1, eos_token_id=1),
}
CURRENT_ARCHITECTURES = {
    "gemma4": gemma4,
    "gemma4_shared_keys": partial(gemma4, num_kv_shared_layers=2),
    "gemma4_experts": partial(gemma4, enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=16),
    "qwen3_moe": partial(build, "qwen3_moe", **EXPERTS, num_experts=4),
    "gpt_oss": partial(build, "gpt_oss", num_local_experts=4, num_experts_per_tok=2, sliding_window=5),
    # A dense first layer, and an expert for every token: their linear layers are named as those of experts once were.
    "glm4_moe": partial(build, "glm4_moe", **EXPERTS, n_routed_experts=4, first_k_dense_replace=1, n_group=1, topk_group=1),
    "olmo3": partial(build, "olmo3", **IN_TURN),
    "smollm3": partial(build, "smollm3"),
    "granite": partial(build, "granite", NO_HEAD_DIM),
    "phi3": partial(build, "phi3", NO_HEAD_DIM),
    "ministral3": partial(build, "ministral3"),
    # Layers that carry state from token to token: prompts are not shared.
    "qwen3_5": partial(build, "qwen3_5_text", **LINEAR_ATTENTION),
    "lfm2": partial(build, "lfm2", NO_HEAD_DIM, layer_types=["conv", "full_attention"], block_multiple_of=8),
}
TOWER = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, patch_size=4)
WITH_TOWERS = {
    "gemma3_vision": partial(
        build, "gemma3", {}, text_config=SIZES | IN_TURN | dict(query_pre_attn_scalar=8),
        vision_config=TOWER | dict(num_hidden_layers=2, image_size=16),
        mm_tokens_per_image=4, boi_token_index=260, eoi_token_index=261, image_token_index=262, initializer_range=0.3),
    "gemma4_vision_audio": partial(
        build, "gemma4", {}, text_config=SIZES | gemma4_text(tie_word_embeddings=False),
        vision_config=TOWER | dict(num_key_value_heads=2, head_dim=8, position_embedding_size=16),
        audio_config=dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, subsampling_conv_channels=[4, 4], output_proj_dims=16),
        initializer_range=0.3, tie_word_embeddings=False),
    # The class of Ministral 3's checkpoints; transformers has none for its text alone under this configuration.
    "mistral3_vision": partial(
        build, "mistral3", {}, text_config=SIZES | dict(model_type="ministral3"),
        vision_config=TOWER | dict(model_type="pixtral", head_dim=8, image_size=16), image_token_index=260, initializer_range=0.3),
}
# The class of Qwen 3.5's checkpoints, of which transformers loads the text model alone.
QWEN3_5_VISION = partial(
    build, "qwen3_5", {}, text_config=SIZES | LINEAR_ATTENTION,
    vision_config=dict(depth=1, hidden_size=16, intermediate_size=32, num_heads=2, patch_size=4, out_hidden_size=32, num_position_embeddings=16),
    image_token_id=260, video_token_id=261, vision_start_token_id=259, vision_end_token_id=258, initializer_range=0.3)
MODELS = ARCHITECTURES | CURRENT_ARCHITECTURES | WITH_TOWERS | {"qwen3_5_vision": QWEN3_5_VISION}
WITH_STATE = "qwen3_5", "qwen3_5_vision", "lfm2"          # prompts are not shared


@pytest.fixture(scope="session")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the built-in model is saved."""
    path = tmp_path_factory.mktemp("policy") / "model"
    save_any_policy(*load_any_policy(ModelConfig()), path)
    return str(path)


@pytest.fixture(params=ARCHITECTURES)
def architecture(request):
    """Name and model, in evaluation mode."""
    torch.manual_seed(0)
    return request.param, ARCHITECTURES[request.param]().eval()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return ARCHITECTURES["gemma3"]().eval()


@pytest.fixture
def matmul_precision():
    """Take back what a test sets for products of float32 matrices."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def shared(model, tokenizer):
    """The model's engine that forwards a prompt once for all its completions, as in a run."""
    return make_engine("shared", model, tokenizer)


@pytest.fixture
def settings():
    """Short completions from a truncated distribution."""
    return GRPOConfig(generation_max_length=12, generation_temperature=0.8, generation_top_p=0.9, generation_top_k=50)


PROMPTS = ["1+1=?", "a somewhat longer prompt than the first", "é", "a somewhat longer prompt than the first"]
QUICK = "--eval_limit 8 --eval_steps 0 --report_to none --batch_size 4 --num_completions_per_prompt 4".split()
QUICK += ["--generation_max_length", "16"]


@pytest.fixture(autouse=True)
def without_curves(monkeypatch):
    """Leave out curves.png, half a second of every run; that of the fixture `finished` is drawn."""
    monkeypatch.setattr("analysis.report.draw_curves", lambda runs: b"")


def exhaustive(*values, **options):
    """Parameters of a test that `make test` leaves out, because it has other ones."""
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.exhaustive], **options)


def length_reward(folder):
    """A reward that hardly ever ties a group."""
    (folder / "length.py").write_text("def length(completions, **columns):\n    return [len(c) for c in completions]\n")
    return f"{folder}/length.py:length"


def peaked_reward(folder):
    """Points that are highest at step 3 of GRPO, whatever is sampled."""
    (folder / "peaked.py").write_text(
        "def peaked(completions, trainer_state, **columns):\n"
        "    return [100.0 - 50 * abs(trainer_state.global_step - 3) + len(c) for c in completions]\n")
    return ["--reward_functions", f"{folder}/peaked.py:peaked"]


def read_programs(name):
    """Name -> program, of a file of tests/reward_functions in which lines that begin with == are names."""
    parts = (Path(__file__).parent / "reward_functions" / name).read_text().split("\n== ")[1:]
    return dict(part.split("\n", 1) for part in parts)


def run_folder(path, *flags):
    train.main([*QUICK, "--output_dir", str(path), *flags])
    return path


def run_process(*words, processes=0, cwd=ROOT, **variables):
    """Run Python with these words, or torchrun with so many processes, to an end without an error. Return what it printed."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes else []
    done = subprocess.run(
        [sys.executable, *torchrun, *map(str, words)], cwd=cwd, env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
        capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done


def quick_config(folder, **flags):
    """The settings of a short run of GRPO alone, on the built-in model."""
    quick = dict(
        use_grpo=True, cold_start_steps=0, max_steps=2, batch_size=4, generation_max_length=8, save_steps=1,
        eval_steps=0, eval_limit=4, log_rollouts_every=1, report_to="none", output_dir=str(folder))
    return Config.from_profile("demo", **quick | flags)


def num_steps(folder):
    """The number of lines of metrics.jsonl so far."""
    path = folder / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


@contextmanager
def ctrl_c_after(step, where="log_step"):
    """Press Ctrl-C when a run has logged this step, or its evaluation."""
    original = getattr(Run, where)

    def press_ctrl_c(run, *rest):
        result = original(run, *rest)
        if run.progress.step == step:
            signal.raise_signal(signal.SIGINT)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, where, press_ctrl_c)
        yield


def watch_calls(patch, owner, name, act=lambda number: None):
    """Return a list to which the arguments of each call of a function are added. act(number of the call) comes before it."""
    real, calls = getattr(owner, name), []

    def watched(*args, **options):
        calls.append(args)
        act(len(calls))
        return real(*args, **options)

    patch.setattr(owner, name, watched)
    return calls


def comparable(folder):
    """What must not depend on when a run was stopped: all but the times."""
    drop = ("seconds", "memory")
    return [{k: v for k, v in m.items() if not any(d in k for d in drop)} for m in read_jsonl(folder / "metrics.jsonl")]


def weights_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "final").state_dict()


def assert_same(left, right):
    """Logs, rollouts and weights of two runs are equal bit for bit."""
    assert comparable(left) == comparable(right)
    assert (left / "rollouts.jsonl").read_bytes() == (right / "rollouts.jsonl").read_bytes()
    for (name, mine), (_, other) in zip(weights_of(left).items(), weights_of(right).items(), strict=True):
        assert torch.equal(mine, other), name


def with_noise(model):
    """Change the adapter, so that it does not add 0."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in trainable_parameters(model):
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def start_run(folder, *flags):
    """A run of the built-in model that is ready for a step of its last phase, later than the first one."""
    config = parse_config([*QUICK, "--output_dir", str(folder / "unused"), "--eval_limit", "0", "--max_steps", "10", *flags])
    run = set_up(config)
    run.progress.phase = len(run.plan.phases) - 1
    run.begin_phase()
    run.progress.phase_step = 1
    return run


def experience_of(run, rollout, rewards):
    """The Experience of a rollout with made-up rewards (P, G), computed as grpo_training_step does."""
    run.progress.add_rewards(rewards)
    groups = Groups([{"prompt": ""}] * len(rewards), rollout, rewards, {}, rewards)
    groups.advantages = train.group_advantages(run, groups)
    return compute_experience(groups, run.config.grpo, run.policy, run.reference)


def shared_log_probs(model, rollout, *, reference=None):
    """As completion_log_probs, by the shared engine."""
    policy = make_engine("shared", model, None)
    return policy.forward(rollout, torch.arange(len(rollout.completion_ids)), reference and policy.like(reference))


def logits_alone(model, rollout, row):
    """The model's own logits (T, V) of one completion, forwarded alone and without padding; and its ids."""
    group_size = len(rollout.completion_ids) // len(rollout.prompt_ids)
    prompt = rollout.prompt_ids[row // group_size][rollout.prompt_mask[row // group_size]]
    ids = rollout.completion_ids[row, : int(rollout.completion_mask[row].nonzero().max()) + 1]
    return model(input_ids=torch.cat([prompt, ids])[None]).logits[0, len(prompt) - 1 : -1], ids


def kept_by_hand(logits, temperature, top_k, top_p, min_p=0.0):
    """Ids that survive, from a sorted list of Python floats."""
    probs = (torch.tensor(logits, dtype=torch.float64) / temperature).softmax(0).tolist()
    likely = [i for i in range(len(probs)) if probs[i] >= min_p * max(probs)]
    order = sorted(likely, key=lambda i: -probs[i])[: top_k or None]
    total, kept, before = sum(probs[i] for i in order), [], 0.0
    for i in order:
        if before / total < top_p:
            kept.append(i)
        before += probs[i]
    return sorted(kept)


def made_up_rollout(prompt_lengths, lengths, vocab_size=200, **distribution):
    """Random ids: groups of one size, ragged completions."""
    draws = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, vocab_size, (n,), generator=draws).tolist() for n in prompt_lengths]
    ids = torch.randint(3, vocab_size, (len(lengths), max(lengths)), generator=draws)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return Rollout(*left_pad(prompts, 0), ids, mask, torch.zeros(mask.shape), mask[:, 0], [""] * len(ids), distribution)


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A GRPO run; with_settings makes the runs of the tests from it."""
    return start_run(tmp_path_factory.mktemp("base"), "--use_grpo", "--cold_start_steps", "0")


def with_settings(base, architecture="gemma3", **grpo):
    """The run with other settings, on a model of two narrow layers, so that rounding has less to add up."""
    torch.manual_seed(0)
    config = replace(base.config, grpo=replace(base.config.grpo, **grpo))
    policy = make_engine("shared", ARCHITECTURES[architecture]().eval(), base.policy.tokenizer, max_tokens=base.policy.max_tokens)
    run = replace(base, plan=replace(base.plan, config=config), policy=policy, progress=replace(base.progress))
    run.batches = Batches(base.plan.data.train_set, 4, 0)
    if run.config.grpo.kl_coef:                           # a reference that differs, or its gradient would vanish
        run.reference = policy.frozen_copy()
        with torch.no_grad():
            run.reference.model.get_output_embeddings().weight.mul_(1.5)
    prepare_policy(policy, base.phase, config, lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=1.0))
    if policy.value_head is not None:
        torch.nn.init.normal_(policy.value_head.layers[-1].weight)
    return run
