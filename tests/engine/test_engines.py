"""The policies that make_engine chooses, those of many processes and little memory, a caller's own sampler, and a teacher."""

import copy
import json
import shutil
from dataclasses import replace
from unittest.mock import MagicMock, call

import pytest
import torch
from conftest import PROMPTS, build, made_up_rollout, quick_config, watch_calls
from torch.nn.utils import parameters_to_vector

import train
from analysis import explain
from config import GRPOConfig, ModelConfig
from engine import device_policy, devices, make_engine
from engine.device_policy import DevicePolicy
from engine.errors import RunError
from engine.models import load_any_policy, save_any_policy
from engine.network import set_precision
from engine.shared import Shared
from engine.vllm_engine import VLLM
from environments.conversations import sample_with_environment
from environments.tools import guess_letter
from experience import Batch
from grpo import weighted_loss
from model import ValueHead
from policy import Policy
from runs.engine_choice import saves_tokens
from runs.setup import set_up


class Own(Policy):
    """A caller's sampler, which does not call reply."""

    def sample(self, prompts, config, seeds, *, num_completions=None, reply=None):
        return super().sample(prompts, config, seeds, num_completions=num_completions)


def test_make_engine_chooses_a_policy_that_forwards_each_row_once_in_several_passes(model, tokenizer):
    rollout = made_up_rollout([9, 5, 7], [5, 1, 9, 4, 12, 3])
    for name, kind in ("plain", Policy), ("shared", Shared):
        engine = make_engine(name, model, tokenizer, max_tokens=40)
        batches = [rows for rows, _ in engine.forward_passes(rollout, torch.arange(6))]
        assert type(engine) is kind and sorted(torch.cat(batches).tolist()) == [*range(6)] and len(batches) > 1
        every, some = engine.log_probs(rollout).logp, engine.log_probs(rollout, torch.tensor([4, 3, 1])).logp
        torch.testing.assert_close(some, every[[4, 3, 1]])
        assert not every.requires_grad
    with pytest.raises(ValueError, match="fast must be plain, shared or vllm"):
        make_engine("fast", model, tokenizer)
    set_precision(model, "bfloat16")
    assert type(make_engine("plain", model, tokenizer)) is DevicePolicy


def gradient(policy):
    return parameters_to_vector(p.grad for p in policy.trained_parameters)


def loss_with_values(new, batch):
    return {"loss": weighted_loss(new.values.square() - new.logp, batch.weights)}, {"entropy": new.entropy}


@pytest.mark.parametrize("make", [DevicePolicy, Shared])
def test_when_memory_runs_out_passes_have_half_the_tokens_and_results_are_the_same(model, tokenizer, settings, monkeypatch, make):
    policy, passes, seen = make(model, tokenizer, max_tokens=150), [], []
    head = ValueHead(32)
    torch.nn.init.normal_(head.layers[-1].weight)
    policy.set_optimizer(torch.optim.SGD([*model.parameters(), *head.parameters()]), None, head)
    rollout, forward = policy.sample(PROMPTS, settings, 0), policy.forward
    batch = Batch.of_rollout(rollout, torch.ones(16, 1))
    logp, losses = policy.log_probs(rollout).logp, policy.forward_backward(batch, loss_with_values)
    once = gradient(policy)
    compute = {"logp": lambda: policy.log_probs(rollout).logp, "losses": lambda: policy.forward_backward(batch, loss_with_values)}

    def short_of_memory(*args):
        passes.append(policy.max_tokens)
        if policy.max_tokens > 75 and len(passes) % 2 == 0:       # in the second pass, after a gradient
            raise MemoryError("out of memory")
        return forward(*args)

    def again(name):
        policy.max_tokens, passes[:] = 150, []
        return compute[name]()

    monkeypatch.setattr(policy, "forward", short_of_memory)
    policy.on_less_memory = lambda *change: seen.append(change)
    torch.testing.assert_close(again("logp"), logp, atol=1e-5, rtol=1e-5)
    assert gradient(policy).equal(once), "not the business of log_probs"
    policy.clear_gradient()
    assert again("losses") == pytest.approx(losses, rel=1e-5) and (gradient(policy) - once).norm() < 1e-5 * once.norm()
    assert seen == [("max_tokens_per_forward", 75, "out of memory: --max_tokens_per_forward 150 -> 75, trying again")] * 2
    with pytest.raises(MemoryError):                      # a repeat would lose the gradient of the first batch
        again("losses")
    monkeypatch.setattr(device_policy, "num_processes", lambda: 2)               # one cannot repeat alone
    for name in compute:
        policy.clear_gradient()
        with pytest.raises(MemoryError):
            again(name)
    assert len(seen) == 2


@pytest.mark.parametrize("copies,first,tried", [(4, 20, [20, 10, 5, 4]), (1, 20, [20, 10, 5, 2, 1]), (4, 3, [3])])
def test_where_memory_runs_out_fewer_completions_are_sampled_at_once_down_to_a_group(shared, settings, monkeypatch, copies, first, tried):
    """A group at once is the least; of an evaluation, which samples one completion of each problem, one."""
    seen = []

    def sample_batches(prompts, config, *rest, **options):
        seen.append(config.generation_batch_size)
        raise MemoryError("out of memory")

    monkeypatch.setattr(shared, "sample_batches", sample_batches)
    for expected in tried, tried[-1:]:                    # what ran out once is not tried again in the next batch
        seen.clear()
        with pytest.raises(MemoryError):
            shared.sample(PROMPTS * 5, replace(settings, generation_batch_size=first), 0, num_completions=copies)
        assert seen == expected
    quick_config("run", generation_batch_size=1)          # less than a group: then a group at once


@pytest.mark.parametrize("fails,before", [
    ("generate", ["wake_up", "apply_model", "collective_rpc", "wake_up", "reset_prefix_cache", "generate"]),
    ("collective_rpc", ["wake_up", "apply_model", "collective_rpc"])])
def test_vllm_is_asked_once_when_memory_runs_out_and_frees_its_own(model, tokenizer, settings, fails, before):
    policy, sampler = DevicePolicy(model, tokenizer), VLLM.__new__(VLLM)
    llm = MagicMock(**{"apply_model.return_value": [True], f"{fails}.side_effect": MemoryError("out of memory")})
    llm.llm_engine.output_processor.request_states = {"7": "left by an error"}
    policy.sampler, sampler.policy, sampler.sleeps, sampler.llm = sampler, policy, True, llm
    sampler.sample = lambda *args, **options: llm.generate()
    with pytest.raises(MemoryError), policy.sampling():
        policy.sample(PROMPTS, settings, 0)
    assert [name for name, *_ in llm.method_calls[:-2]] == before
    assert llm.method_calls[-2:] == [call.llm_engine.abort_request(["7"], internal=True), call.sleep(level=2)]


def test_a_reference_is_computed_as_a_callers_own_policy_is_without_its_optimizer_and_sampler(model, tokenizer, settings):
    class WithClient(DevicePolicy):
        def __init__(self, model, tokenizer, client):
            super().__init__(model, tokenizer, max_tokens=100)
            self.client, self.sampler = client, "another sampler"

    policy, other = WithClient(model, tokenizer, "client"), copy.deepcopy(model)
    policy.set_optimizer(torch.optim.SGD(model.parameters()), "schedule", "value head")
    policy.losses.append(1.0)
    reference = policy.like(other)
    assert type(reference) is WithClient and reference.model is other and reference.max_tokens == 100
    assert (reference.optimizer, reference.value_head, reference.sampler, reference.losses) == (None, None, None, [])
    assert policy.optimizer is not None and policy.losses == [1.0]
    rollout = reference.sample(PROMPTS, settings, 0)
    assert reference.log_probs(rollout, torch.arange(0)).logp.shape == (0, rollout.completion_ids.shape[1])


@pytest.mark.parametrize("make", [DevicePolicy, Shared])
def test_processes_forward_every_row_once_and_have_as_many_passes(model, tokenizer, monkeypatch, make):
    policy, rollout = make(model, tokenizer, max_tokens=30), made_up_rollout([9, 5, 7], [5, 1, 9, 4, 12, 3])
    for size, rows in (2, [0, 1, 2, 3, 4, 5]), (4, [0, 1, 2, 3, 4, 5]), (3, [5, 0]), (2, [3]):
        monkeypatch.setattr(devices, "num_processes", lambda size=size: size)
        parts = []
        for rank in range(size):
            monkeypatch.setattr(devices, "process_rank", lambda rank=rank: rank)
            parts.append([part.tolist() for part, new in policy.forward_passes(rollout, torch.tensor(rows)) if len(new.logp) == len(part)])
        assert sorted(row for each in parts for part in each for row in part) == sorted(rows) and len(set(map(len, parts))) == 1
        assert all(each[0] for each in parts[: len(rows)]), "a row for each process, if there are enough"


def test_a_sampler_of_ones_own_trains_and_evaluates_and_a_run_that_is_resumed_without_it_says_so(tmp_path, capsys, monkeypatch):
    sampled = watch_calls(monkeypatch, Own, "sample")
    train.train(quick_config(tmp_path / "run"), engine=Own)
    assert [len(prompts) for _, prompts, *_ in sampled] == [2, 4, 4, 4, 4], "start-up check, evaluation, two steps, evaluation"
    set_up(quick_config(tmp_path / "run", resume=True))
    assert "'engine': 'Own'}: equal up to rounding" in " ".join(capsys.readouterr().out.split())


def test_an_engine_that_does_not_call_reply_is_refused_with_an_environment(model, tokenizer, settings):
    model.generation_config.eos_token_id = list(range(1, 200))
    with pytest.raises(RunError, match="the policy's sample does not call reply, which an environment needs"):
        sample_with_environment(Own(model, tokenizer), guess_letter, [{"prompt": "p", "answer": "x"}], settings, [0])


@pytest.mark.parametrize("prompt,copies,limit,saves", [(8, 4, 40, False), (200, 8, 512, True), (100, 8, 4000, False), (40, 8, 24, True)])
def test_prompts_are_shared_where_that_saves_a_fifth_of_the_tokens(prompt, copies, limit, saves):
    assert saves_tokens(prompt, GRPOConfig(num_completions_per_prompt=copies, generation_max_length=limit)) == saves


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """The folder of the built-in model with other weights."""
    torch.manual_seed(7)
    model, tokenizer = load_any_policy(ModelConfig())
    folder = tmp_path_factory.mktemp("teacher")
    save_any_policy(model, tokenizer, folder)
    return folder


def run_of(tmp_path, teacher, **flags):
    of_kl = dict(reference_path=str(teacher), use_kl_penalty=True, kl_penalty_coef=1.0)
    return quick_config(tmp_path / "run", **of_kl | dict(reward_functions=["none"], save_steps=2) | flags)


def test_without_rewards_the_loss_is_the_kl_to_the_teacher(tmp_path, teacher):
    run = set_up(run_of(tmp_path, teacher, kl_estimator="exact"))
    run.begin_phase()
    metrics, experience = train.grpo_training_step(run, run.batches.take(4))
    assert train.without_signal(run, experience.groups).all() and (experience.groups.rewards == 0).all()
    expected = run.policy.like(run.teacher).log_probs(experience.table.rollout, reference=run.reference).kl
    assert expected.abs().max() < 1e-5, "the reference is the teacher"
    assert metrics["policy_loss"] == 0 and metrics["total_loss"] == pytest.approx(metrics["kl"]) and metrics["kl"] > 0.01


def test_a_step_with_a_teacher_alone_is_explained_although_all_groups_are_tied(tmp_path, teacher, capsys):
    flags = "--use_grpo --cold_start_steps 0 --batch_size 2 --eval_limit 0 --generation_max_length 8 --report_to none"
    explain.main([*flags.split(), "--reference_path", str(teacher), *"--reward_functions none --use_kl_penalty true --kl_estimator exact".split()])
    printed = capsys.readouterr().out
    assert "gradient norm" in printed and "all groups" not in printed


def test_a_teacher_whose_head_is_padded_to_more_rows_teaches_the_same_and_one_with_fewer_rows_is_refused(tmp_path, teacher):
    model, tokenizer = load_any_policy(ModelConfig(model_path=str(teacher)))
    model.resize_token_embeddings(300)
    model.config.pad_token_id = 299                       # as after add_special_tokens({"pad_token": "[PAD]"})
    save_any_policy(model, tokenizer, tmp_path / "padded")
    kl = []
    for name, folder in ("as it is", teacher), ("padded", tmp_path / "padded"):
        train.train(run_of(tmp_path / name, folder, kl_estimator="exact", max_steps=1, save_steps=0))
        kl.append(json.loads((tmp_path / name / "run/metrics.jsonl").open().readlines()[1])["kl"])
    assert kl[0] == kl[1] > 0
    with pytest.raises(ValueError, match=r"its head has 263 rows, that of the policy 300, .* --kl_estimator ratio_k3, or resize_token_embeddings\(263\)"):
        set_up(run_of(tmp_path, teacher, kl_estimator="exact", model_path=str(tmp_path / "padded")))


def test_a_teacher_whose_logits_are_not_those_of_its_own_pass_is_refused(tmp_path, tokenizer):
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, lru_width=32)
    model = build("recurrent_gemma", sizes, vocab_size=263, logits_soft_cap=0.5)
    save_any_policy(model.eval(), tokenizer, tmp_path / "teacher")         # its soft cap has a name of its own
    with pytest.raises(ValueError, match=r"start-up check: teacher: logprobs\.py and the model's own logits differ by at most"):
        set_up(run_of(tmp_path, tmp_path / "teacher"))


def test_a_teacher_that_reads_other_tokens_is_refused_before_the_policy_is_loaded(tmp_path, teacher, monkeypatch):
    other = shutil.copytree(teacher, tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    vocabulary = json.loads(text)
    first, second = [token for token, number in vocabulary["model"]["vocab"].items() if number in (100, 101)]
    vocabulary["model"]["vocab"] |= {first: 101, second: 100}
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    monkeypatch.setattr("runs.setup.load_any_policy", lambda *args, **kwargs: pytest.fail("loaded"))
    with pytest.raises(ValueError, match=r"--reference_path=.*other: 2 of 263 tokens differ there \(.* is 10[01] here and 10[01] there\)"):
        set_up(run_of(tmp_path, other))
