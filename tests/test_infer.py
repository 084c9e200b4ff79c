"""Asking and measuring."""

import pytest

import infer
from config import ModelConfig
from infer import evaluate, wilson_interval
from model import load_policy, save_policy


@pytest.fixture
def folder(tmp_path):
    save_policy(*load_policy(ModelConfig()), tmp_path / "model")
    return str(tmp_path / "model")


@pytest.mark.parametrize("successes,n,low,high", [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0)])
def test_wilson_intervals_of_the_literature(successes, n, low, high):
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=1e-4)


def test_a_question_is_answered_with_reasoning_set_apart(folder, capsys, monkeypatch):
    infer.main(["--model_path", folder, "--question", "1+1=?", "--generation_max_length", "5"])
    assert "--generation_max_length=5" in capsys.readouterr().out
    real = infer.sample_completions_for_prompts

    def scripted(*args, **kwargs):
        rollout = real(*args, **kwargs)
        rollout.completions = ["<reasoning>1 and 1</reasoning><answer>2</answer>"]
        return rollout

    monkeypatch.setattr(infer, "sample_completions_for_prompts", scripted)
    infer.main(["--model_path", folder, "--question", "1+1=?", "--generation_max_length", "5"])
    assert capsys.readouterr().out.startswith("reasoning: 1 and 1\nanswer: 2\n")


def test_accuracy_counts_sampled_answers(folder, monkeypatch, settings, capsys):
    model, tokenizer = load_policy(ModelConfig(model_path=folder))
    real = infer.sample_completions_for_prompts

    def scripted(model, tokenizer, prompts, *args, **kwargs):
        rollout = real(model, tokenizer, prompts, *args, **kwargs)
        rollout.completions = [f"<answer>{'1' if p == 'easy' else '0'}</answer>" for p in prompts]
        return rollout

    monkeypatch.setattr(infer, "sample_completions_for_prompts", scripted)
    examples = [{"prompt": "easy", "answer": "1"}] * 3 + [{"prompt": "hard", "answer": "1"}] + [{"prompt": "unknown"}]
    result = evaluate(model, tokenizer, examples, settings, seed=0, batch_size=2)
    assert result["eval_accuracy"] == 0.75 and result["eval_problems"] == 4
    assert (result["eval_accuracy_low"], result["eval_accuracy_high"]) == wilson_interval(3, 4)
    assert "eval_accuracy" not in evaluate(model, tokenizer, examples[-1:], settings, seed=0)
    infer.main(["--model_path", folder, "--evaluate", "arithmetic", "--limit", "4", "--generation_max_length", "4"])
    assert "accuracy 0.000 [0.000, 0.490] of 4" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["--question", "q", "--evaluate", "arithmetic"]])
def test_one_thing_at_a_time(argv):
    with pytest.raises(ValueError, match="one of them"):
        infer.main(argv)
