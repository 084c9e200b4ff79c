"""The seams: engines that sample and score, among them a caller's own."""

import copy
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from config import Config, GRPOConfig
from engine import make_engine, saves_tokens
from engine.errors import RunError
from engine.plain import Engine
from engine.shared import Shared
from environments.conversations import sample_with_environment
from environments.games import guess_letter
from runs.setup import set_up
from sample import sample_completions_for_prompts
from conftest import PROMPTS
from train import train

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
CODE = re.search(r"```python run\n(.*?)\nconfig = ", PAGE.read_text().partition("## A sampler")[2], flags=re.DOTALL)[1]


def of_the_page(old="", new=""):
    """The class of the page, with one part of it changed."""
    names = {}
    assert old in CODE
    exec(CODE.replace(old, new), names)
    return names["Generate"]


def settings_of_run(folder, **more):
    flags = dict(
        use_grpo=True, cold_start_steps=0, max_steps=2, batch_size=4, eval_limit=4, save_steps=1, report_to="none",
        output_dir=str(folder), generation_max_length=8)
    return Config.from_profile("demo", **flags | more)


def test_an_engine_samples_and_scores_as_the_functions_do_and_shared_differs_by_rounding(model, tokenizer, settings):
    plain, shared = make_engine("plain", model, tokenizer, max_tokens=100), make_engine("shared", model, tokenizer, max_tokens=100)
    assert (type(plain), type(shared), plain.shares_prompts, shared.shares_prompts) == (Engine, Shared, False, True)
    rollout = sample_completions_for_prompts(model, tokenizer, PROMPTS, settings, seed=0)
    for engine in plain, shared:
        sampled = engine.sample(PROMPTS, settings, seeds=0)
        assert torch.equal(sampled.completion_ids, rollout.completion_ids)
        batches = engine.micro_batches(rollout, torch.arange(len(rollout.completion_ids)))
        assert sorted(torch.cat(batches).tolist()) == list(range(len(rollout.completion_ids))) and len(batches) > 1
        for rows in batches:
            logp = engine.log_probs(rollout, rows, settings.distribution).logp
            torch.testing.assert_close(logp, rollout.sampling_logp[rows], atol=1e-4, rtol=0)
    assert len(plain.micro_batches(rollout, torch.arange(4), min_batches=4)) == 4
    with pytest.raises(ValueError, match="fast must be plain or shared"):
        make_engine("fast", model, tokenizer)


def test_the_sampler_of_the_page_trains_and_evaluates_and_a_run_that_is_resumed_without_it_says_so(tmp_path, capsys):
    sampled, generate = [], of_the_page()

    class Counted(generate):
        def sample(self, prompts, config, **options):
            sampled.append(len(prompts))
            return super().sample(prompts, config, **options)

    train(settings_of_run(tmp_path / "run"), engine=Counted)
    assert sampled == [4, 4, 4, 4], "evaluation, two steps, evaluation"
    resumed = settings_of_run(tmp_path / "run", resume=True)
    set_up(resumed)
    assert "'engine': 'Counted'}: equal up to rounding" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("old, new", [
    ("temperature=config.generation_temperature", "temperature=1.3"),
    ("attention_mask=prompt_mask.", "attention_mask=torch.ones_like(prompt_mask)."),
    ("scores.gather(-1, ids[..., None])[..., 0]", "scores.amax(dim=-1)"),
], ids=["temperature", "padding", "log-probabilities"])
def test_a_sampler_that_is_wrong_ends_the_run_at_its_first_step(tmp_path, old, new):
    with pytest.raises(RunError, match="first ratios must be 1"):
        train(settings_of_run(tmp_path), engine=of_the_page(old, new), reward_functions=lambda completions, **columns: list(map(len, completions)))


def test_an_engine_that_does_not_call_reply_is_refused_with_an_environment(model, tokenizer, settings):
    model.generation_config.eos_token_id = list(range(1, 200))
    with pytest.raises(RunError, match="engine Generate does not call reply: an environment needs that"):
        sample_with_environment(of_the_page()(model, tokenizer), guess_letter, [{"prompt": "p", "answer": "x"}], settings, seed=0)


def test_rows_that_have_ended_do_not_forward_a_pad_token_that_the_model_does_not_know(model, tokenizer, settings):
    model.generation_config.eos_token_id = list(range(1, 30))
    config = replace(settings, num_completions_per_prompt=8, generation_max_length=20)
    expected = make_engine("plain", model, tokenizer).sample(PROMPTS, config, seeds=0)
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"pad_token": "<another pad>"})
    assert tokenizer.pad_token_id == model.get_input_embeddings().num_embeddings
    found = make_engine("plain", model, tokenizer).sample(PROMPTS, config, seeds=0)
    assert found.completions == expected.completions and found.finished.any()


@pytest.mark.parametrize("prompt,copies,limit,saves", [(8, 4, 40, False), (200, 8, 512, True), (100, 8, 4000, False), (40, 8, 24, True)])
def test_prompts_are_shared_where_that_saves_a_fifth_of_the_tokens(prompt, copies, limit, saves):
    config = GRPOConfig(num_completions_per_prompt=copies, generation_max_length=limit)
    shared, plain = prompt + copies * limit, copies * (prompt + limit)
    assert saves_tokens(prompt, config) == saves == (1 - shared / plain > 0.2)


@pytest.mark.slow
def test_auto_is_plain_for_short_prompts_and_shared_for_long_ones(tmp_path):
    for limit, engine in (40, Engine), (8, Shared):
        run = set_up(settings_of_run(tmp_path / str(limit), generation_max_length=limit))
        assert type(run.engine) is engine
