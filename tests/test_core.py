"""The core stands alone: it imports itself and libraries, and trains in an empty folder as it does here."""

import ast
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from config import ModelConfig
from model import ValueHead, frozen_copy, load_policy, save_policy, update_reference

ROOT = Path(__file__).parents[1]
CORE = ["grpo", "logprobs", "sample", "rewards", "data", "model", "experience", "config", "policy"]
LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "transformers", "tokenizers"}


def imports_of(name: str) -> set[str]:
    """The modules at the top of the project and the libraries that a core file imports, wherever in it."""
    tree = ast.parse((ROOT / f"{name}.py").read_text())
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    named = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {module.partition(".")[0] for module in named | {node.module for node in nodes if isinstance(node, ast.ImportFrom)}}


def test_core_files_import_core_files_and_libraries_alone():
    found = {name: imports_of(name) - LIBRARIES for name in CORE}
    assert found == {
        "grpo": set(), "rewards": set(), "logprobs": set(), "data": set(), "config": {"grpo", "logprobs"}, "sample": {"data", "logprobs"}, "model": {"rewards"},
        "experience": {"grpo", "logprobs", "rewards", "sample"},
    }
    assert imports_of("data") <= sys.stdlib_module_names and imports_of("grpo") <= {*sys.stdlib_module_names, "torch"}


@pytest.mark.parametrize("options,message", [
    (dict(model_path="some/model"), "--model_path=some/model: this loads folders of float32 weights"),
    (dict(model_path=".", lora_rank=4), "--lora_rank=4: this loads"), (dict(model_path=".", precision="bfloat16"), "--precision=bfloat16: this loads"),
])
def test_what_the_core_cannot_load_is_refused_in_one_line(options, message):
    with pytest.raises(ValueError, match=f"^{message}.*$"):
        load_policy(ModelConfig(**options))


def test_a_reference_follows_the_policy_which_is_saved_and_loaded(tmp_path):
    model, tokenizer = load_policy(ModelConfig())
    reference = frozen_copy(model)
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    before = reference.lm_head.weight.clone()
    update_reference(reference, model, 0.75)
    torch.testing.assert_close(reference.lm_head.weight, before + 0.25)
    assert not any(parameter.requires_grad for parameter in reference.parameters()) and not model.training
    save_policy(model, tokenizer, tmp_path)
    again, _ = load_policy(ModelConfig(str(tmp_path)))
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    assert ValueHead(128)(torch.ones(2, 128)).tolist() == [0.0, 0.0]


def run(folder: Path, *command: str) -> None:
    """Run Python in a folder. An installation of the project for development is not found there."""
    if folder != ROOT:
        (folder / "sitecustomize.py").write_text(
            "import sys\nsys.meta_path[:] = [finder for finder in sys.meta_path if 'editable' not in repr(finder)]\n"
            f"sys.path[:] = [path for path in sys.path if path != {str(ROOT)!r}]\n")
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
<<<<<<< HEAD
=======
    return done


def test_core_files_import_core_files_and_libraries_alone():
    found = {name: imports_of(name) - LIBRARIES for name in CORE}
    assert found.pop("rewards") == {"analysis"}, "the linter, where rewards.py is a program"
    assert found == {
        "grpo": set(), "logprobs": set(), "data": set(), "config": {"grpo"}, "sample": {"data", "logprobs"}, "model": {"rewards"},
        "experience": {"grpo", "logprobs", "rewards", "sample"}, "policy": {"logprobs", "sample"},
    }
    assert imports_of("data") <= sys.stdlib_module_names


def test_rewards_alone_score_with_a_function_of_ones_own_none_and_one_that_raises(tmp_path):
    assert imports_of("rewards") - {"analysis"} <= {*sys.stdlib_module_names, "torch"}
    shutil.copy(ROOT / "rewards.py", tmp_path)
    run(tmp_path, "-c", """
import math
from types import SimpleNamespace
import torch
from rewards import compute_rewards_for_completions, correctness

texts = ["<answer>2</answer>", "3", "<answer>5</answer>", "<answer>6</answer>"]
mask = torch.tensor([[True, True], [True, False]] * 2)
rollout = SimpleNamespace(completions=texts, completion_ids=torch.arange(8).view(4, 2), completion_mask=mask)
examples = [{"prompt": "1+1", "answer": "2"}, {"prompt": [{"role": "user", "content": "Say it."}], "answer": None}]
calls = []

def tokens(completions, prompts, completion_ids, answer, **columns):
    calls.append("tokens")
    assert completions == [*texts[:2], *([{"role": "assistant", "content": text}] for text in texts[2:])]
    assert prompts == ["1+1"] * 2 + [examples[1]["prompt"]] * 2 and answer == ["2", "2", None, None] and columns == {}
    return [len(ids) for ids in completion_ids]

def later(completions, **columns):
    calls.append("started")
    return lambda: calls.append("awaited") or [1.0, math.nan, None, None]

total, points = compute_rewards_for_completions([correctness, tokens], [1.0, 0.5], rollout, examples)
assert total.tolist() == [[2.0, 0.5], [1.0, 0.5]], "the second group without correctness: None for both"
assert points["correctness"][0].tolist() == [1, 0] and points["correctness"][1].isnan().all()
assert points["tokens"].tolist() == [[2, 1], [2, 1]]

calls.clear()
total, points = compute_rewards_for_completions([later, tokens], [1.0, 1.0], rollout, examples)
assert calls == ["started", "tokens", "awaited"], "all are started before the first is awaited"
assert total[0, 0] == 3 and total[0, 1].isnan() and total[1].tolist() == [2, 1], "NaN: it failed; None: it does not apply"
total, _ = compute_rewards_for_completions([lambda **_: [math.nan] * 4, tokens], [1.0, 1.0], rollout, examples)
assert total.isnan().all(), "failed on all siblings is not None for all siblings"
total, _ = compute_rewards_for_completions([lambda **_: [math.nan] * 4, tokens], [0.0, 1.0], rollout, examples)
assert total.isfinite().all()                             # of weight 0, so watched alone
total, _ = compute_rewards_for_completions([lambda **_: [None, 1, 2, None], tokens], [1.0, 1.0], rollout, examples)
assert total.isnan().tolist() == [[True, False], [False, True]], "None for some siblings: not comparable"
total, _ = compute_rewards_for_completions([lambda **_: [1, 2, None, None]], [1.0], rollout, examples)
assert total[0].tolist() == [1, 2] and total[1].isnan().all(), "a group that no function applies to has no score"

def refused(returned):
    try:
        compute_rewards_for_completions([lambda **_: returned], [1.0], rollout, examples)
    except ValueError as error:
        return str(error)

expected = "return a list with one number (or None) for each of the 4 completions"
assert refused([1.0]) == f"reward function <lambda> returned 1 values for 4 completions; {expected}"
assert refused(["x"] * 4) == f"reward function <lambda> returned ['x', 'x', 'x', 'x']; {expected}"
assert "infinite" in refused([math.inf] * 4)
try:
    compute_rewards_for_completions([correctness, lambda completions, **columns: 1 / 0], [1.0, 1.0], rollout, examples)
except ZeroDivisionError:
    print("raised")
""")


POLICIES = dict(temperature=1.0), dict(temperature=0.7, top_k=20), dict(temperature=1.3, top_p=0.8)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_log_probabilities_alone_are_those_of_transformers_row_by_row(kind, tmp_path):
    """A copy of logprobs.py in an empty folder; GPT-2 has learned positions, so it notices wrong ones."""
    torch.manual_seed(0)
    model = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(
            vocab_size=263, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)),
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=263, n_positions=64, n_embd=32, n_layer=2, n_head=4)),
    }[kind]().eval()
    model.save_pretrained(tmp_path / "model")
    rollout = made_up_rollout([9, 3], [7, 4, 1, 6])
    torch.save({name: x for name, x in vars(rollout).items() if isinstance(x, torch.Tensor)}, tmp_path / "rollout.pt")
    shutil.copy(ROOT / "logprobs.py", tmp_path)
    run(tmp_path, "-c", f"""
from types import SimpleNamespace
import torch
from transformers import AutoModelForCausalLM
from logprobs import Distribution, completion_log_probs
model = AutoModelForCausalLM.from_pretrained("model").eval()
rollout = SimpleNamespace(**torch.load("rollout.pt"))
results = []
for policy in {POLICIES!r}:
    model.zero_grad()
    rollout.distribution = Distribution(**policy)
    found = completion_log_probs(model, rollout)
    found.logp.sum().backward()
    results.append([found.logp.detach(), found.entropy.detach(), model.get_input_embeddings().weight.grad])
torch.save(results, "found.pt")
""")
    for policy, found in zip(POLICIES, torch.load(tmp_path / "found.pt")):
        compare_by_hand(model, rollout, policy, *found)


def compare_by_hand(model, rollout, policy, logp, entropy, gradient):
    """Each completion alone, without padding, through the model's own logits."""
    total = 0.0
    for row in range(4):
        prompt = rollout.prompt_ids[row // 2][rollout.prompt_mask[row // 2]]
        ids = rollout.completion_ids[row][rollout.completion_mask[row]]
        logits = model(torch.cat([prompt, ids])[None]).logits[0, len(prompt) - 1 : -1] / policy["temperature"]
        ranked, order = logits.softmax(-1).sort(descending=True)
        outside = ranked.cumsum(-1) - ranked >= policy.get("top_p", 2.0)
        outside[:, policy.get("top_k", 263) :] = True
        outside = torch.zeros_like(outside).scatter(1, order, outside).scatter(1, ids[:, None], False)       # the chosen one stays
        log_p = logits.masked_fill(outside, -1e9).log_softmax(-1)
        here = log_p.gather(1, ids[:, None])[:, 0]
        torch.testing.assert_close(logp[row, : len(ids)], here, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(entropy[row, : len(ids)], -(log_p.exp() * log_p).sum(-1), atol=1e-5, rtol=1e-5)
        assert not logp[row, len(ids) :].any()
        total = total + here.sum()
    (by_hand,) = torch.autograd.grad(total, [model.get_input_embeddings().weight])
    torch.testing.assert_close(gradient, by_hand, atol=1e-5, rtol=1e-4)


def test_the_sampler_alone_gives_what_it_gives_here(tmp_path, model, tokenizer, settings):
    save_policy(model, tokenizer, tmp_path / "model")
    for name in ["sample", "logprobs", "data", "rewards"]:
        shutil.copy(ROOT / f"{name}.py", tmp_path)
    done = run(tmp_path, "-c", f"""
from types import SimpleNamespace
from transformers import AutoModelForCausalLM, AutoTokenizer
from sample import sample_completions_for_prompts
config = SimpleNamespace(
    num_completions_per_prompt=2, generation_max_length=6, generation_temperature=0.8, generation_top_k=0, generation_top_p=1.0,
    generation_batch_size=2)
rollout = sample_completions_for_prompts(
    AutoModelForCausalLM.from_pretrained("model"), AutoTokenizer.from_pretrained("model"), {PROMPTS!r}, config, 1)
print(rollout.completion_ids.tolist())
""")
    config = replace(
        settings, num_completions_per_prompt=2, generation_max_length=6, generation_temperature=0.8, generation_top_k=0,
        generation_top_p=1.0, generation_batch_size=0)
    assert done.stdout.strip() == str(sample_completions_for_prompts(model, tokenizer, PROMPTS, config, 1).completion_ids.tolist())


def test_data_alone_reads_json_lines_and_encodes_prompts_and_demonstrations(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    shutil.copy(ROOT / "data.py", tmp_path)
    rows = [{"question": "2+2?", "answer": 4}, {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "good.jsonl").write_text("\n\n".join(lines))
    for name, line in ("no_json", '{"prompt": '), ("no_object", "[1]"), ("no_prompt", '{"text": "a"}'), ("half", '{"prompt": "\\ud800"}'):
        (tmp_path / f"{name}.jsonl").write_text("\n".join([lines[0], "", line, lines[1]]))
    done = run(tmp_path, "-c", """
import json
from transformers import AutoTokenizer
from data import encode_demonstration, encode_prompt, load_examples
def answer(function, *args, **options):
    try:
        return function(*args, **options)
    except ValueError as error:
        return str(error)
files = "good.jsonl", "no_json.jsonl", "no_object.jsonl", "no_prompt.jsonl", "half.jsonl", "none.jsonl"
others = "openai/gsm8k:main", "data.csv", "countdown", ["a", 5], [], {"train": []}, iter("a"), type("DataFrame", (list,), {"keys": None})("a")
tokenizer = AutoTokenizer.from_pretrained("tokenizer")
chat = [{"role": "user", "content": "2+2?<eos>"}]
plain = [encode_prompt(tokenizer, prompt) for prompt in ("2+2?", chat)], encode_demonstration(tokenizer, "2+2?", "4", [1])
tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
templated = [encode_prompt(tokenizer, prompt) for prompt in ("2+2?", chat)], encode_demonstration(tokenizer, "2+2?", "4", [1])
print(json.dumps([[answer(load_examples, source) for source in (*files, *others)], plain, templated, [
    load_examples("arithmetic", "test", limit=2), load_examples("good.jsonl", limit=1, columns={"prompt": "question", "answer": "question"}),
    load_examples(["a", {"prompt": "b", "nums": [1]}]), answer(load_examples, "arithmetic", "dev"),
    answer(load_examples, "good.jsonl", columns={"completion": "gold"}), answer(encode_demonstration, tokenizer, "p", chat, [1])]]))
""")
    (good, *refused), plain, templated, more = json.loads(done.stdout)
    assert good == [rows[0] | {"prompt": "2+2?", "answer": "4"}, rows[1] | {"prompt": rows[1]["messages"][:1], "completion": "b"}]
    for text, expected in zip(refused, [
        r"no_json.jsonl: line 3 is not JSON: .*; correct it", r"no_object.jsonl: line 3 is not an object such as .*",
        r"no_prompt.jsonl: line 3 has columns text; it needs a value in one of prompt, question, .*", r"half.jsonl: line 3 is not JSON: .*surrogates.*",
        r"none.jsonl: no such file", *[rf"{name}: neither .* from sources import load_examples" for name in (
            "openai/gsm8k:main", "data.csv", "countdown")],
        r"dataset: example 2: the prompt must be text or chat messages, not int: 5", r"dataset: no examples in it",
        r"dataset: must be a list of examples .*, not a dict: choose a split.*", r"dataset: must be a list .*, not a str_.*iterator: .*",
        r"dataset: must be a list .*, not a DataFrame: choose a split, or pass a list of dicts",
    ], strict=True):
        assert re.fullmatch(expected, text), text
    for (prompts, (ids, mask)), texts in (plain, ["<bos>2+2?", "<bos>user: 2+2?<eos>\nassistant: "]), (
            templated, ["[user]2+2?<eos>[assistant]", "[user]2+2?<eos><eos>[assistant]"]):
        assert [tokenizer.decode(prompt) for prompt in prompts] == texts
        assert (tokenizer.decode(ids), mask) == ("4<eos>", [True, True])
    assert [[prompt.count(1) for prompt in prompts] for prompts, _ in (plain, templated)] == [[0, 0], [1, 1]], "EOS is the template's alone"
    (sums, named, listed, *messages) = more
    assert [eval(row["prompt"].removesuffix("=?")) for row in sums] == [int(row["answer"]) for row in sums] and len(sums) == 2
    assert named == [rows[0] | {"prompt": "2+2?", "answer": "2+2?"}] and listed == [{"prompt": "a"}, {"prompt": "b", "nums": [1]}]
    assert messages == [
        "arithmetic: there is no split dev; it has train and test",
        "--completion_column=gold: good.jsonl: line 1 has columns question, answer",
        "[{'role': 'user', 'content': '2+2?<eos>'}] is no text: pass encode_turns of environments.messages"]


def test_the_policy_alone_is_loaded_saved_and_followed_and_refuses_what_rooms_do(tmp_path):
    for name in "model", "rewards", "config", "grpo", "logprobs":
        shutil.copy(ROOT / f"{name}.py", tmp_path)
    run(tmp_path, "-c", """
import torch
from config import Config, GRPOConfig, ModelConfig
from model import ValueHead, frozen_copy, load_policy, save_policy, update_reference
config = Config.from_profile("balanced", use_grpo=True, loss_type="gspo", seed=3)
assert (config.grpo.loss_type, config.training.seed, config.training.warmup_ratio) == ("gspo", 3, 0.1)
model, tokenizer = load_policy(ModelConfig())
assert tokenizer.decode(tokenizer("1+1=?").input_ids, skip_special_tokens=True) == "1+1=?" and not model.training
reference = frozen_copy(model)
with torch.no_grad():
    model.lm_head.weight.add_(1.0)
before = reference.lm_head.weight.clone()
update_reference(reference, model, 0.75)
torch.testing.assert_close(reference.lm_head.weight, before + 0.25)
assert not any(parameter.requires_grad for parameter in reference.parameters())
assert ValueHead(128)(torch.ones(2, 128)).tolist() == [0.0, 0.0]
save_policy(model, tokenizer, "saved")
again, _ = load_policy(ModelConfig("saved"))
assert torch.equal(again.lm_head.weight, model.lm_head.weight)
for make, message in (
    (lambda: load_policy(ModelConfig("some/model")), "--model_path=some/model: this loads folders of float32 weights"),
    (lambda: load_policy(ModelConfig("saved", lora_rank=4)), "--lora_rank=4: this loads"),
    (lambda: load_policy(ModelConfig("saved", precision="bfloat16")), "--precision=bfloat16: this loads"),
    (lambda: GRPOConfig(num_completions_per_prompt=1), "--num_completions_per_prompt=1: must be at least 2"),
    (lambda: Config.of(beta=1.0), "beta: unknown; the flags are model_path, "),
):
    try:
        make()
    except ValueError as error:
        assert str(error).startswith(message) and "\\n" not in str(error), error
    else:
        raise AssertionError(message)
""")


def test_an_experience_alone_has_advantages_and_the_reference_of_a_rollout(tmp_path):
    for name in CORE:
        shutil.copy(ROOT / f"{name}.py", tmp_path)
    run(tmp_path, "-c", """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from config import GRPOConfig
from experience import Groups, compute_experience
from grpo import compute_group_advantages
from logprobs import completion_log_probs
from model import byte_tokenizer
from policy import Policy

torch.manual_seed(0)
make = lambda: GPT2LMHeadModel(GPT2Config(vocab_size=263, n_embd=32, n_layer=2, n_head=4, eos_token_id=1)).eval()
policy, reference = Policy(make(), byte_tokenizer(), max_tokens=64), make()
config = GRPOConfig(num_completions_per_prompt=2, generation_max_length=6, use_kl_penalty=True)
rollout = policy.sample(["one", "three"], config, 0)
rewards = torch.tensor([[0.0, 1.0], [2.0, float("nan")]])
groups = Groups([{}, {}], rollout, rewards, {}, rewards)
found = compute_experience(groups, compute_group_advantages(rewards), config, policy, reference)
assert found.advantages[:2, 0].tolist() == [-found.advantages[1, 0].item(), found.advantages[1, 0].item()] != [0, 0]
assert not found.mask[3].any() and found.mask[:3].equal(rollout.completion_mask[:3])
expected = completion_log_probs(reference, rollout).logp
torch.testing.assert_close(found.reference_logp, expected.detach(), atol=1e-5, rtol=0)
""")
>>>>>>> proto


@pytest.mark.slow
def test_the_loop_over_the_core_alone_trains_as_train_py_does_bit_for_bit(tmp_path):
    flags = ["--cold_start_steps", "2", "--max_steps", "3", "--seed", "1", "--output_dir"]
    for name in CORE:
        shutil.copy(ROOT / f"{name}.py", tmp_path)
    (tmp_path / "examples").mkdir()
    shutil.copy(ROOT / "examples/minimal.py", tmp_path / "examples")
    run(tmp_path, "examples/minimal.py", *flags, "alone")
    run(ROOT, "train.py", "--use_grpo", "--engine", "plain", "--report_to", "none", *flags, str(tmp_path / "whole"))
    alone, whole = (
        hashlib.sha256((tmp_path / name / "final/model.safetensors").read_bytes()).hexdigest() for name in ("alone", "whole"))
    assert alone == whole
