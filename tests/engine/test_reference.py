"""A teacher: --reference_path, distillation without rewards, refused, explained."""

import json
import shutil
from functools import partial

import pytest
import torch
from conftest import experience_of, logits_alone, quick_config
from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

import train
from analysis import explain
from config import ModelConfig
from engine.models import load_any_policy, save_any_policy
from runs.setup import set_up

@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """The folder of the built-in model with other weights."""
    torch.manual_seed(7)
    model, tokenizer = load_any_policy(ModelConfig())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    folder = tmp_path_factory.mktemp("teacher")
    save_any_policy(model, tokenizer, folder)
    return folder


def run_of(tmp_path, teacher, **flags):
    of_kl = dict(reference_path=str(teacher), use_kl_penalty=True, kl_penalty_coef=1.0)
    return quick_config(tmp_path / "run", **of_kl | dict(reward_functions=["none"], save_steps=2) | flags)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["exact", "ratio_k3"])
def test_without_rewards_the_gradient_is_that_of_the_kl_to_the_teacher(tmp_path, teacher, estimator):
    run = set_up(run_of(tmp_path, teacher, kl_estimator=estimator))
    run.begin_phase()
    groups = train.sample_groups(run, run.batches.take(4))
    assert train.without_signal(run, groups).all() and (groups.rewards == 0).all()
    policy, config = run.policy, run.config.grpo
    experience = experience_of(run, groups.rollout, groups.rewards)
    reference = run.reference if estimator == "exact" else None
    losses = policy.forward_backward(experience.batch(torch.arange(16)), partial(train.grpo_loss, config), reference=reference)
    found = {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}
    policy.clear_gradient()
    rollout = experience.table.rollout
    total, count = 0.0, int(rollout.completion_mask.sum())
    for row in range(16):                                 # plain transformers, a completion at a time
        (p, chosen), (q, _) = (logits_alone(model, rollout, row) for model in (policy.model, run.teacher))
        p, q = p.log_softmax(-1), q.log_softmax(-1)
        if estimator == "exact":
            total = total + (p.exp() * (p - q.detach())).sum() / count
        else:
            p, q = p.gather(1, chosen[:, None]), q.detach().gather(1, chosen[:, None])
            total = total + ((p - p.detach()).exp() * ((q - p).exp() - (q - p) - 1)).sum() / count
    total.backward()
    assert losses["kl"] == pytest.approx(total.item(), rel=1e-4) and losses["policy_loss"] == 0
    for name, parameter in policy.model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-6, msg=name)


def test_a_step_with_a_teacher_alone_is_explained_although_all_groups_are_tied(tmp_path, teacher, capsys):
    flags = "--use_grpo --cold_start_steps 0 --batch_size 2 --eval_limit 0 --generation_max_length 8 --report_to none"
    explain.main([*flags.split(), "--reference_path", str(teacher), *"--reward_functions none --use_kl_penalty true --kl_estimator exact".split()])
    printed = capsys.readouterr().out
    assert "gradient norm" in printed and "all groups" not in printed


def test_a_teacher_whose_head_is_padded_to_more_rows_teaches_the_same(tmp_path, teacher):
    model, tokenizer = load_any_policy(ModelConfig(model_path=str(teacher)))
    model.resize_token_embeddings(300)
    model.config.pad_token_id = 299                       # as after add_special_tokens({"pad_token": "[PAD]"})
    save_any_policy(model, tokenizer, tmp_path / "padded")
    kl = []
    for name, folder in ("as it is", teacher), ("padded", tmp_path / "padded"):
        train.train(run_of(tmp_path / name, folder, kl_estimator="exact", max_steps=1, save_steps=0))
        kl.append(json.loads((tmp_path / name / "run/metrics.jsonl").open().readlines()[1])["kl"])
    assert kl[0] == kl[1] > 0


def test_the_exact_kl_to_a_head_of_fewer_rows_is_refused(tmp_path, teacher):
    model, tokenizer = load_any_policy(ModelConfig(model_path=str(teacher)))
    model.resize_token_embeddings(300)
    save_any_policy(model, tokenizer, tmp_path / "policy")
    with pytest.raises(ValueError, match=r"its head has 263 rows, that of the policy 300, .* --kl_estimator ratio_k3, or resize_token_embeddings\(263\)"):
        set_up(run_of(tmp_path, teacher, kl_estimator="exact", model_path=str(tmp_path / "policy")))


def test_a_teacher_whose_logits_are_not_those_of_its_own_pass_is_refused(tmp_path, tokenizer):
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, lru_width=32)
    model = RecurrentGemmaForCausalLM(RecurrentGemmaConfig(vocab_size=263, **sizes, logits_soft_cap=0.5))
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
