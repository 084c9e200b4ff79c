"""Each assumption that the start-up check tests is broken here once."""

import copy

import pytest
import torch

from runs import startup_check
import logprobs
import sample
from engine import make_engine, plain, shared
from engine.ranks import Ranks
from runs.startup_check import check_setup, choose_engine
from runs.setup import set_up
from conftest import ARCHITECTURES, start_run
from tokenizers import processors
from config import Config, GRPOConfig
from rewards import correctness

EXAMPLES = [{"prompt": "47+85=?", "answer": "132"}, {"prompt": "a longer one", "answer": "2"}]


def findings_of(model, tokenizer, settings, functions=()):
    return {f.name: f for f in check_setup(make_engine("shared", model, tokenizer), EXAMPLES, settings, list(functions))}


def test_a_sampler_that_forgets_the_temperature_is_found(model, tokenizer, settings, monkeypatch):
    def without_temperature(*args, temperature=1.0, **options):
        return logprobs.completion_log_probs(*args, **options)

    monkeypatch.setattr(plain, "completion_log_probs", without_temperature)
    found = findings_of(model, tokenizer, settings)["sampler"]
    assert found.ok is False and "nat" in found.found and "--generation_top_p" in found.fix


def test_a_head_without_the_soft_cap_is_found(model, tokenizer, settings, monkeypatch):
    model.config.final_logit_softcapping = 5.0
    assert findings_of(model, tokenizer, settings)["head"].ok
    monkeypatch.setattr(logprobs, "scale_and_softcap", lambda model, raw: raw)
    assert findings_of(model, tokenizer, settings)["head"].ok is False


def test_a_model_that_cannot_be_packed_is_noted_and_rows_are_used(model, tokenizer, settings, monkeypatch):
    real, rows = shared.pack_groups, make_engine("plain", model, tokenizer)

    def completions_do_not_see_their_prompt(*args):
        batch = real(*args)
        batch.layout.prefix.clear()
        return batch

    monkeypatch.setattr(shared, "pack_groups", completions_do_not_see_their_prompt)
    engine, found = choose_engine(rows, Ranks(), [example["prompt"] for example in EXAMPLES], settings)
    assert engine is rows and found.ok is None and "plain rows instead" in found.found


@pytest.mark.parametrize("numbers,agree", [("highest", False), ("high", True)])
def test_tf32_is_given_the_tolerance_of_16_bits(model, numbers, agree):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(numbers)
    try:
        assert startup_check.compare(model, "head", "two", torch.zeros(3), torch.full((3,), 0.05), "").ok is agree
    finally:
        torch.set_float32_matmul_precision(before)


def test_positions_that_are_ignored_are_found(tokenizer, settings, monkeypatch):
    model = ARCHITECTURES["gpt2"]().eval()                # learned positions: rotary ones notice no shift
    monkeypatch.setattr(sample, "positions_of", lambda mask: torch.arange(mask.shape[1]).expand(mask.shape))
    same = [{"prompt": "47+85=?"}] * 2                    # of equal length
    both = (check_setup(make_engine(name, model, tokenizer), same, settings, []) for name in ("plain", "shared"))
    assert [f.ok for findings in both for f in findings if f.name == "sampler"] == [False, True]


def test_two_bos_tokens_are_found(model, tokenizer, settings, monkeypatch):
    real = startup_check.encode_prompt
    monkeypatch.setattr(startup_check, "encode_prompt", lambda *a: [tokenizer.bos_token_id, *real(*a)])
    assert findings_of(model, tokenizer, settings)["BOS"].ok is False
    monkeypatch.setattr(startup_check, "encode_prompt", lambda *a: [*real(*a), tokenizer.bos_token_id, 9] * 2)
    assert findings_of(model, tokenizer, settings)["BOS"].ok, "a template may begin every message with it"


def test_the_sampler_that_is_checked_is_that_of_the_run(tmp_path, capsys):
    for engine, checked in (None, "sampler"), (plain.Engine, "engine"):
        set_up(Config.of(output_dir=str(tmp_path / "run"), report_to="none"), engine=engine)
        agreed = capsys.readouterr().out.partition("start-up check: ")[2]
        assert [name for name in ("sampler", "engine") if f"{name} ok" in agreed] == [checked], agreed


def test_rewards_of_gold_empty_and_wrong_completions(model, tokenizer, settings):
    config = GRPOConfig(reward_functions=["correctness"])
    found = findings_of(model, tokenizer, config, [correctness])["rewards"]
    assert found.ok and found.found.startswith("gold 1.00, empty 0.00, wrong 0.00")


def test_rewards_that_score_nothing_are_found(model, tokenizer):
    def never(completions, **columns):
        return [None] * len(completions)

    config = GRPOConfig(reward_functions=["never"], reward_weights=[1.0])
    found = findings_of(model, tokenizer, config, [never])["rewards"]
    assert found.ok is False and found.found == "never returned None or NaN for each of 12 completions"
    assert found.fix.startswith("nothing could be scored: ")


def test_of_a_function_that_always_raises_the_check_says_what_it_raised(model, tokenizer):
    def fussy(completions, **columns):
        raise KeyError("level")

    config = GRPOConfig(reward_functions=["fussy"], reward_weights=[1.0], reward_errors="none")
    found = findings_of(model, tokenizer, config, [fussy])["rewards"]
    assert found.ok is False and found.found == "fussy failed: KeyError: 'level'"


def test_long_answers_and_rows_that_gain_nothing_by_their_answer_are_noted(model, tokenizer):
    def of_short_ones(completions, answer, **columns):
        return [None if len(one) > 1 else float(one in text) for text, one in zip(completions, answer)]

    def notes(answers, function):
        examples = [{"prompt": "1+1=?", "answer": answer} for answer in answers]
        config = GRPOConfig(reward_functions=["correctness"])
        findings = check_setup(make_engine("plain", model, tokenizer), examples, config, [function], more_rows=True)
        return [f.found for f in findings if f.name == "rows"]

    text = "because " * 21
    assert notes(["2"] * 20, correctness) == [] and notes(["2", "because " * 20], correctness) == []
    assert notes(["2", "12", "4"] * 7, of_short_ones) == ["gold earns no more than wrong in 5 of 16 examples"]
    assert notes(["2", text, "3"] * 7, correctness) == [
        f"7 of 21 answers have more than 20 words, such as {text!r:.60}: does each end with its answer, in a form of docs/data.md?"]


def test_the_first_prompt_is_shown_and_messages_without_a_template_are_noted(model, tokenizer, settings):
    for prompt, noted in ("1+1=?", False), ([{"role": "user", "content": "1+1=?"}], True):
        findings = {f.name: f for f in check_setup(make_engine("plain", model, tokenizer), [{"prompt": prompt}] * 2, settings, [])}
        assert ("template" in findings) == noted and "1+1=?" in findings["first prompt"].found
    assert "user: 1+1=?" in findings["first prompt"].found and "no chat template" in findings["template"].found


@pytest.mark.parametrize("end,noted", [("<think>\n", True), ("<reasoning>", True), ("<assistant>", False), ("A:", False), ("</think>\n\n", False), ("<|bot|>\n", False)])
def test_a_template_that_opens_thoughts_is_noted(model, tokenizer, settings, end, noted):
    templated = copy.deepcopy(tokenizer)
    templated.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '" + end.replace("\n", "\\n") + "' if add_generation_prompt }}"
    findings = {f.name: f for f in check_setup(make_engine("plain", model, templated), EXAMPLES, settings, [])}
    assert ("template" in findings) == noted
    if noted:
        assert findings["template"].ok is None and f"ends with {end!r}: completions, which are scored, begin after it" in findings["template"].found


def test_disagreement_that_is_not_a_number_is_not_agreement(model):
    assert startup_check.compare(model, "x", "a and b", torch.full((1, 3), torch.nan), torch.zeros(1, 3), "").ok is False


def test_engine_plain_forwards_plain_rows_and_says_so(tmp_path, capsys):
    run = start_run(tmp_path, "--engine", "plain")
    assert run.engine.shares_prompts is False and "plain rows ok" in capsys.readouterr().out
    assert start_run(tmp_path / "auto").engine.shares_prompts is True


def test_a_tokenizer_that_appends_eos_to_prompts_is_seen_by_the_check(model, tokenizer, settings):
    appending = copy.deepcopy(tokenizer)
    appending.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 2), ("<eos>", 1)]
    )
    findings = {f.name: f for f in check_setup(make_engine("shared", model, appending), [{"prompt": "1+1=?"}] * 2, settings, [])}
    assert findings["open prompt"].ok is False and findings["sampler"].ok
